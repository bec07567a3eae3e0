"""`kvrelay changes`, `kvrelay cancel` and `kvrelay plan`, and Ctrl-C in `kvrelay scale`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.plan import plan_view
from cluster import control
from cluster.control import ChangeStep
from kvrelay.v1 import controller_pb2
from kvrelay.v1.controller_pb2 import ChangeRecord, ListChangesResponse
from tests.cli.conftest import FakeLifecycle, Run

LISTED = ListChangesResponse(
    changes=[
        ChangeRecord(id=2, kind="scale", description="decode=3", state="waiting", waits_for=[1], took_s=4.0),
        ChangeRecord(
            id=1,
            kind="planner",
            description="decode=2",
            state="failed",
            took_s=9.0,
            error="no host had 4 free CPUs\nlog",
        ),
    ]
)


@pytest.fixture(autouse=True)
def running(folder: Path, lifecycle: FakeLifecycle) -> Path:
    """A running cluster."""
    (folder / "serving.yaml").write_text("name: mine\n")
    run_dir = lifecycle.default_run_dir("mine")
    lifecycle.running.add(run_dir)
    return run_dir


def test_changes_lists_state_what_it_waits_for_and_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "read_changes", lambda run_dir: LISTED)
    lines = run("changes").stdout.splitlines()

    (second,) = [line for line in lines if "scale decode=3" in line]
    (first,) = [line for line in lines if "planner decode=2" in line]
    assert "waiting, after 1" in second and "4 s" in second
    assert "failed" in first and "no host had 4 free CPUs" in first
    assert lines.index(second) < lines.index(first)


def test_changes_as_json_has_every_field(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "read_changes", lambda run_dir: LISTED)
    newest = json.loads(run("changes", "--json").stdout)["changes"][0]
    assert set(newest) == {field.name for field in ChangeRecord.DESCRIPTOR.fields}
    assert (newest["id"], newest["waits_for"]) == (2, [1])


def test_changes_before_the_first_one_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "read_changes", lambda run_dir: ListChangesResponse())
    assert "nothing has changed" in run("changes").stdout


def test_cancel_shows_the_steps_back_and_prints_how_it_ended(
    run: Run, running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def cancel(run_dir: Path, change_id: int) -> Iterator[ChangeStep]:
        asked.append((run_dir, change_id))
        yield ChangeStep(text="stays at decode=1")
        yield ChangeStep(text="change 3 (scale decode=2) is cancelled")

    monkeypatch.setattr(control, "cancel", cancel)
    result = run("cancel", "3")
    assert result.exit_code == 0
    assert result.stdout == "change 3 (scale decode=2) is cancelled\n"
    assert "stays at decode=1" in result.stderr
    assert asked == [(running, 3)]


@pytest.mark.parametrize(
    ("num_steps", "message"),
    [(1, "change 7 goes on; `kvrelay cancel 7` cancels it"), (0, "the change goes on; `kvrelay changes` shows it")],
)
def test_ctrl_c_in_scale_ends_the_display_and_tells_how_to_cancel(
    run: Run, monkeypatch: pytest.MonkeyPatch, num_steps: int, message: str
) -> None:
    def scale(*_: Any, **__: Any) -> Iterator[ChangeStep]:
        for _step in range(num_steps):
            yield ChangeStep(text="starting decode-1", change_id=7)
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "scale", scale)
    result = run("scale", "decode=2")
    assert result.exit_code == 130
    assert message in result.stderr


def test_scale_of_a_cluster_that_is_not_supervised_yet_says_why(run: Run, lifecycle: FakeLifecycle) -> None:
    lifecycle.trouble = "GCS is away"
    result = run("scale", "decode=2")
    assert result.exit_code == 1
    assert "the controller does not supervise the cluster yet: GCS is away" in result.stderr


def shown(response: controller_pb2.GetPlanResponse) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(plan_view(response))
    return captured.get()


def make_record(*, wanted: int, outcome: str) -> controller_pb2.PlanRecord:
    return controller_pb2.PlanRecord(
        age_s=3.0,
        prefill=controller_pb2.PoolPlan(present=2, wanted=wanted),
        decode=controller_pb2.PoolPlan(present=1, wanted=1),
        reason="many come",
        terms=[controller_pb2.PlanTerm(name="requests_per_s", value=7.25)],
        outcome=outcome,
    )


def test_plan_shows_sizes_reason_numbers_and_changes() -> None:
    record = make_record(wanted=3, outcome="under way")
    text = shown(controller_pb2.GetPlanResponse(mode="act", interval_s=10.0, latest=record, changes=[record]))
    assert "planner: act, every 10 s, the last time 3 s ago" in text
    assert "prefill 2 -> 3, decode 1" in text
    assert "many come [under way]" in text
    assert "requests_per_s  7.25" in text
    assert text.count("many come") == 2


def test_plan_that_is_off_says_how_to_turn_it_on() -> None:
    assert "planner.mode: advise or act" in shown(controller_pb2.GetPlanResponse(mode="off"))


def test_plan_before_the_first_one_says_so() -> None:
    assert "no plan yet" in shown(controller_pb2.GetPlanResponse(mode="act", interval_s=1.0))


def test_plan_watch_as_json_is_a_usage_error(run: Run) -> None:
    assert run("plan", "--watch", "--json").exit_code == 2
