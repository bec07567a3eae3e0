import json
from pathlib import Path

import pytest

from cli.console import out
from cli.render import AskedRouter, status_view
from common.errors import Unreachable
from kvrelay.client import ClusterStatus
from kvrelay.client.convert import record
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.cli.conftest import FakeLifecycle, Run
from tests.client.fake_server import FakeInference
from tests.client.messages import worker_view


def test_status_shows_router_and_workers(run: Run, address: str) -> None:
    result = run("status", "-a", address)
    assert result.exit_code == 0
    assert f"router {address} · http://127.0.0.1:8000/v1 · policy predictive" in result.stdout
    assert "4 queued, 2 active · 11 completed" in result.stdout
    assert "\n4 requests wait in line\n" in result.stdout
    assert "refused: 7 of batch (slo)" in result.stdout
    assert "tenant batch: 4 queued" in result.stdout
    assert "512 tokens pinned now, pins of 0 refused" in result.stdout
    assert "3 answers set back" in result.stdout
    assert "ALARM no_updates: p0 is silent" in result.stdout
    prefill = next(line for line in result.stdout.splitlines() if line.startswith(" prefill-0"))
    cells = [cell.strip() for cell in prefill.split("│")]
    assert cells == [
        *("prefill-0", "ready", "1", "2", "4", "9", "64", "3 of 12", "500 of 800", "1", "0", "0", "0"),
        *("30%", "80%", "0 B", "5.0 MiB", "75.00 s", "4242"),
    ]
    assert "decode-0" in result.stdout
    assert "lost" in result.stdout


def test_status_names_workers_whose_answers_may_go_on_differently_elsewhere() -> None:
    view = worker_view("d0", worker_pb2.WORKER_ROLE_DECODE)
    view.exact_resume = False
    status = record(ClusterStatus, pb.GetClusterStatusResponse(workers=[view]))
    with out.capture() as shown:
        out.print(status_view([AskedRouter(address="a:1", status=status)]))
    assert "ready, no exact resume" in shown.get()


def test_status_names_the_ranks_of_workers_that_have_several() -> None:
    views = [worker_view(name, worker_pb2.WORKER_ROLE_DECODE) for name in ("d0", "d1")]
    views[0].status.num_ranks, views[1].status.num_ranks = 3, 1
    status = record(ClusterStatus, pb.GetClusterStatusResponse(workers=views))
    with out.capture() as shown:
        out.print(status_view([AskedRouter(address="a:1", status=status)]))
    assert "ready, 3 ranks" in shown.get()
    assert "1 rank" not in shown.get()


def test_status_says_why_the_controller_does_not_supervise(
    run: Run, address: str, folder: Path, lifecycle: FakeLifecycle
) -> None:
    (folder / "serving.yaml").write_text("name: mine\n")
    lifecycle.running.add(lifecycle.default_run_dir("mine"))
    lifecycle.address, lifecycle.trouble = address, "GCS is away"
    result = run("status")
    assert result.exit_code == 0
    assert "the controller does not supervise the processes: GCS is away" in result.stderr
    assert "prefill-0" in result.stdout


def test_status_as_json_has_every_field(run: Run, address: str) -> None:
    status = json.loads(run("status", "-a", address, "--json").stdout)
    assert status["router"]["num_completed"] == 11
    assert status["router"]["alarms"] == ["no_updates: p0 is silent"]
    assert status["workers"][0]["status"]["load"]["num_free_blocks"] == 60
    assert status["workers"][1]["status"] is None


def test_status_watch_goes_on_over_a_failure_until_interrupted(
    run: Run, fake: FakeInference, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    def sleep(interval_s: float) -> None:
        rounds.append(interval_s)
        fake.unary_error = Unreachable("gone") if len(rounds) == 1 else None
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("cli.console.sleep", sleep)
    result = run("status", "-a", address, "--watch", "--interval", "0.5")
    assert result.exit_code == 0
    assert rounds == [0.5] * 3
    assert "prefill-0" in result.stdout


def test_status_watch_as_json_is_a_usage_error(run: Run) -> None:
    assert run("status", "--watch", "--json").exit_code == 2


def test_status_of_several_routers_shows_which_is_down_and_the_workers_once(run: Run, address: str) -> None:
    result = run("status", "-a", f"127.0.0.1:1,{address}")
    assert result.exit_code == 0
    assert "router 127.0.0.1:1 is DOWN: no kvrelay cluster answers" in result.stdout
    assert f"router {address} ·" in result.stdout
    assert result.stdout.count("prefill-0") == 1


def test_status_of_several_routers_as_json_names_each(run: Run, address: str) -> None:
    status = json.loads(run("status", "-a", f"127.0.0.1:1,{address}", "--json").stdout)
    down, up = status["routers"]
    assert (down["address"], down["status"]) == ("127.0.0.1:1", None)
    assert "no kvrelay cluster answers" in down["error"]
    assert (up["address"], up["status"], up["error"]) == (address, status["router"], "")


def test_status_when_no_router_answers_fails(run: Run) -> None:
    assert run("status", "-a", "127.0.0.1:1,127.0.0.1:2").exit_code == 1
