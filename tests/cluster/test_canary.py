"""Judgements of canaries."""

import pytest

from cluster.changes.canary import MARGIN_S, CanaryObservation, DecodeLoad, judge
from cluster.processes.plan import ProcessRole
from cluster.processes.worker_calls import WorkerSnapshot
from common.timing import StepModel, TimingModel

DECODE, PREFILL = ProcessRole.DECODE, ProcessRole.PREFILL


def observed(
    name: str, *, step_s: float = 0.01, num_samples: int = 50, num_deaths: int = 0, busy_s: float = 1.0
) -> CanaryObservation:
    """Return a worker whose steps all take the same time."""
    model = StepModel(constant_s=step_s, num_samples=num_samples)
    timing = TimingModel(prefill=model, decode=model, max_step_tokens=256)
    return CanaryObservation(name=name, num_deaths=num_deaths, snapshot=snapshot(timing, busy_s=busy_s))


def snapshot(timing: TimingModel, *, busy_s: float = 1.0) -> WorkerSnapshot:
    return WorkerSnapshot(busy_s=busy_s, num_decodes=0, num_context_tokens=0, timing=timing)


def is_good(canary: CanaryObservation, *others: CanaryObservation, role: ProcessRole = DECODE) -> bool:
    return judge(role, canary, others, load=DecodeLoad(), max_slowdown=1.5).is_good


def test_canary_as_fast_as_the_others_is_good() -> None:
    verdict = judge(DECODE, observed("d1"), [observed("d0")], load=DecodeLoad(), max_slowdown=1.5)

    assert verdict.is_good
    assert verdict.reason == "d1 served: a gap between tokens is 10.0 ms, the others 10.0 ms"


@pytest.mark.parametrize("role", [DECODE, PREFILL])
def test_canary_is_bad_from_the_allowed_slowdown_and_the_margin_on(role: ProcessRole) -> None:
    # A prompt of 512 tokens takes two steps of 256.
    limit_s = 1.5 * 0.01 + MARGIN_S / (2 if role is PREFILL else 1)

    assert is_good(observed("new", step_s=limit_s - 1e-6), observed("old"), role=role)
    assert not is_good(observed("new", step_s=limit_s + 1e-6), observed("old"), role=role)


def test_others_count_by_their_median() -> None:
    others = [observed("d0", step_s=0.01), observed("d1", step_s=0.01), observed("d2", step_s=10.0)]

    assert not is_good(observed("d3", step_s=0.1), *others)


def test_pace_is_compared_at_the_load_that_the_canary_had() -> None:
    light = TimingModel(
        prefill=StepModel(constant_s=1.0),
        decode=StepModel(constant_s=0.001, per_decode_s=0.01, num_samples=9),
        max_step_tokens=256,
    )
    canary = CanaryObservation(name="d1", num_deaths=0, snapshot=snapshot(light))
    one, many = DecodeLoad(num_decodes=1), DecodeLoad(num_decodes=40)

    assert judge(DECODE, canary, [observed("d0")], load=one, max_slowdown=1.5).is_good
    assert not judge(DECODE, canary, [observed("d0")], load=many, max_slowdown=1.5).is_good


@pytest.mark.parametrize(("num_deaths", "of_other", "expected"), [(1, 0, False), (1, 1, True), (2, 1, False)])
def test_canary_that_died_is_bad_unless_another_died_as_often(num_deaths: int, of_other: int, expected: bool) -> None:
    assert is_good(observed("d1", num_deaths=num_deaths), observed("d0", num_deaths=of_other)) is expected


def test_canary_without_load_is_good_and_says_so() -> None:
    verdict = judge(DECODE, observed("d1", busy_s=0.0), [observed("d0")], load=DecodeLoad(), max_slowdown=1.5)

    assert verdict.is_good
    assert "no load to judge it by" in verdict.reason


def test_guessed_timing_is_compared_with_nothing() -> None:
    assert is_good(observed("d1", step_s=9.0, num_samples=0), observed("d0"))
    assert is_good(observed("d1", step_s=9.0), observed("d0", num_samples=0))
    assert is_good(observed("d1", step_s=9.0))
