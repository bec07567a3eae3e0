"""Arms as processes: answers, failures that name their log, and nothing left behind."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.engine.cases import Case, Rate
from benchmarks.engine.measure import Plan, run
from benchmarks.figures import Figures
from benchmarks.peers.group import ArmSpec
from benchmarks.peers.process import Arm, ArmFailed
from engine.work import DeviceRates, ModelShape

TIMEOUT_S = 60.0
MODEL = ModelShape(
    num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=4, vocab_size=5
)

StartArm = Callable[..., Arm]


@pytest.fixture
def start_arm(tmp_path: Path) -> Iterator[StartArm]:
    with ExitStack() as stack:

        def start(mode: str, name: str = "echo") -> Arm:
            command = [sys.executable, "-m", "tests.benchmarks.echo_arm", mode]
            return stack.enter_context(Arm(ArmSpec(name=name, command=command), log_path=tmp_path / f"{name}.log"))

        yield start


def test_arm_answers_every_prompt_with_times_that_never_go_back(start_arm: StartArm) -> None:
    arm = start_arm("plain")
    arm.wait_ready(timeout_s=TIMEOUT_S)

    outputs = arm.generate([[10, 1], [20]], 3, timeout_s=TIMEOUT_S)

    assert [output.token_ids for output in outputs] == [[10, 11, 12], [20, 21, 22]]
    assert all(output.times_s == sorted(output.times_s) for output in outputs)


def test_arm_when_it_cannot_start_shows_the_end_of_its_log(start_arm: StartArm) -> None:
    arm = start_arm("broken")

    with pytest.raises(ArmFailed, match=r"(?s)echo died; its log is .*this engine cannot start"):
        arm.wait_ready(timeout_s=TIMEOUT_S)


def test_arm_when_a_request_raises_says_why_and_goes_on(start_arm: StartArm) -> None:
    arm = start_arm("raises")
    arm.wait_ready(timeout_s=TIMEOUT_S)

    for _ in range(2):
        with pytest.raises(ArmFailed, match="refused a request: ValueError: no such prompt"):
            arm.generate([[1]], 1, timeout_s=TIMEOUT_S)


def test_arm_when_it_dies_in_a_request_says_so(start_arm: StartArm) -> None:
    arm = start_arm("dies")
    arm.wait_ready(timeout_s=TIMEOUT_S)

    with pytest.raises(ArmFailed, match="echo died"):
        arm.generate([[1]], 1, timeout_s=TIMEOUT_S)


def test_arm_when_answers_are_too_short_is_refused(start_arm: StartArm) -> None:
    arm = start_arm("short")
    arm.wait_ready(timeout_s=TIMEOUT_S)

    with pytest.raises(ArmFailed, match=r"answered 1 prompts with \[3\] tokens, not 4 each"):
        arm.generate([[1]], 4, timeout_s=TIMEOUT_S)


def test_arm_when_it_says_nothing_in_time_is_given_up(start_arm: StartArm) -> None:
    arm = start_arm("silent")

    with pytest.raises(ArmFailed, match="echo said nothing for 0 s"):
        arm.wait_ready(timeout_s=0.0)


def test_arm_when_closed_takes_its_helpers_along(start_arm: StartArm) -> None:
    arm = start_arm("helper")
    arm.wait_ready(timeout_s=TIMEOUT_S)
    helper = psutil.Process(arm.about["pid"])

    arm.close()

    psutil.wait_procs([helper], timeout=TIMEOUT_S)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def run_arms(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Figures, list[str]]]:
    rates = DeviceRates(read_bytes_per_s=1.0, flops_per_s=1.0)
    monkeypatch.setattr("engine.model.floors.RateMeter.__init__", lambda _self: None)
    monkeypatch.setattr("engine.model.floors.RateMeter.measure", lambda _self: rates)
    monkeypatch.setattr("benchmarks.engine.measure._SETTLE_S", 0.0)

    def measure(*arms: Arm) -> tuple[Figures, list[str]]:
        for arm in arms:
            arm.wait_ready(timeout_s=TIMEOUT_S)
        case = Case(name="case", rate=Rate.MIXED, num_requests=2, prompt_tokens=3, output_tokens=4)
        lines: list[str] = []
        plan = Plan(cases=[case], num_rounds=2, vocab_size=1000, seed=1, model=MODEL)
        return run(arms, plan, lines.append), lines

    return measure


def test_run_alternates_the_arms_drops_the_first_round_and_compares_the_answers(
    start_arm: StartArm, run_arms: Callable[..., tuple[Figures, list[str]]]
) -> None:
    figures, lines = run_arms(start_arm("plain", name="a"), start_arm("plain", name="b"))

    found = {(figure.arm, figure.unit): figure.rounds for figure in figures.all.values()}
    assert all(len(rounds) == 2 for rounds in found.values())
    assert found["b", "same tokens"] == found["b", "same first tokens"] == [1.0, 1.0]
    assert found["at best", "TFLOP per s"] == [1e-12, 1e-12]
    turns = [key[2] for key in figures.all if key[3] == "tokens per s"]
    assert turns == ["b", "a"]
    assert len(lines) == 3


def test_run_when_another_engine_dies_goes_on_without_it(
    start_arm: StartArm, run_arms: Callable[..., tuple[Figures, list[str]]]
) -> None:
    figures, _ = run_arms(start_arm("plain", name="kvrelay"), start_arm("dies", name="b"), start_arm("plain", name="c"))

    assert {figure.arm for figure in figures.all.values()} == {"kvrelay", "c", "at best"}
    assert "b died" in figures.missing["b"]


def test_run_when_our_engine_dies_fails(
    start_arm: StartArm, run_arms: Callable[..., tuple[Figures, list[str]]]
) -> None:
    with pytest.raises(ArmFailed, match="kvrelay int4 died"):
        run_arms(start_arm("plain", name="kvrelay"), start_arm("dies", name="kvrelay int4"))
