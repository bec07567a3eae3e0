"""Requests that no worker can serve in time."""

from dataclasses import replace

import pytest

from common.errors import RefusalCause, Refused
from common.ids import WorkerId
from common.timing import MIN_SAMPLES, StepModel, TimingModel
from router.choosing.shedding import Shed, find_hopeless
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan
from tests.router import fleets
from tests.router.fleets import fleet

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.0, per_prefill_token_s=0.001, num_samples=MIN_SAMPLES),
    decode=StepModel(constant_s=0.01),
    max_step_tokens=512,
)
NO_PLAN = Refused(reason="full", retry_after_s=1.0)
P, D = WorkerId("p0"), WorkerId("d0")


def worker(name: str, *, queue_s: float = 0.0, timing: TimingModel = TIMING) -> ProjectedLoad:
    return fleets.worker(name, prefill_free_at_s=50.0 + queue_s, timing=timing)


def view(prefill: ProjectedLoad) -> FleetView:
    return fleet(prefill, worker(D, queue_s=100.0))


def request(
    *, time_left_s: float = 1e9, ttft_slo_s: float = 1e9, waited_s: float = 0.0, cached: int = 0
) -> PlacementRequest:
    """Return a request of 1000 tokens: a second of prefill on an idle worker."""
    return fleets.request(
        1000,
        block_size=10,
        cached={P: cached},
        now_s=50.0,
        received_s=50.0 - waited_s,
        ttft_slo_s=ttft_slo_s,
        deadline_s=50.0 + time_left_s,
    )


def plan(predicted_ttft_s: float | None) -> Plan:
    return Plan(
        prefill=P,
        answering=D,
        predicted_cached_tokens=0,
        reason="",
        predicted_ttft_s=predicted_ttft_s,
    )


@pytest.mark.parametrize(
    ("queue_s", "cached", "time_left_s", "is_hopeless"),
    [(0.0, 0, 1.1, False), (0.0, 0, 0.9, True), (1.0, 0, 1.9, True), (1.0, 50, 1.6, False), (1.0, 50, 1.4, True)],
)
@pytest.mark.parametrize("outcome", [plan(None), NO_PLAN], ids=["silent policy", "no plan"])
def test_deadline_is_held_against_the_least_that_any_worker_needs(
    queue_s: float, cached: int, time_left_s: float, is_hopeless: bool, outcome: Plan | Refused
) -> None:
    asked = request(time_left_s=time_left_s, cached=cached)
    refused = find_hopeless(asked, outcome, view(worker(P, queue_s=queue_s)), shed=Shed.DEADLINE)
    assert (refused is not None) is is_hopeless


@pytest.mark.parametrize(
    ("time_left_s", "timing", "is_hopeless"),
    [(1.7, fleets.TIMING, False), (1.5, fleets.TIMING, True), (1.5, TIMING, False)],
    ids=["in time", "late", "not measured"],
)
def test_deadline_before_an_answer_has_ended_and_made_room_is_missed(
    time_left_s: float, timing: TimingModel, is_hopeless: bool
) -> None:
    # Two answers of 100 tokens, 12 ms each: one ends every 0.6 s, and a second of prefill follows.
    full = fleet(worker(P), replace(worker(D, queue_s=100.0, timing=timing), num_decodes=2, num_answer_tokens=100.0))
    place_s = full.decode.answer_ends_in_s()
    refused = find_hopeless(request(time_left_s=time_left_s), NO_PLAN, full, shed=Shed.DEADLINE, place_s=place_s)
    assert (refused is not None) is is_hopeless


def test_worker_that_holds_the_prompt_is_found_among_many_that_are_free_sooner() -> None:
    sooner = [worker(f"p{idx}", queue_s=10.0) for idx in range(1, 30)]
    many = fleet(*sooner, worker(P, queue_s=10.5), worker(D, queue_s=100.0))
    assert find_hopeless(request(time_left_s=10.8, cached=90), NO_PLAN, many, shed=Shed.DEADLINE) is None
    assert find_hopeless(request(time_left_s=10.8), NO_PLAN, many, shed=Shed.DEADLINE) is not None


def test_prediction_of_the_policy_goes_before_our_own() -> None:
    asked = request(time_left_s=2.0)
    assert find_hopeless(asked, plan(1.9), view(worker(P, queue_s=9.0)), shed=Shed.DEADLINE) is None
    refused = find_hopeless(asked, plan(5.0), view(worker(P)), shed=Shed.DEADLINE)
    assert refused is not None
    assert (refused.cause, refused.is_final) == (RefusalCause.DEADLINE, True)
    assert refused.retry_after_s == pytest.approx(3.0)
    assert "predicted in 5.00 s; the caller's deadline leaves 2.00 s" in refused.reason


def test_time_waited_counts_against_the_objective_and_only_slo_sheds_for_it() -> None:
    asked = request(ttft_slo_s=2.0, waited_s=1.5)
    refused = find_hopeless(asked, plan(1.0), view(worker(P)), shed=Shed.SLO)
    assert refused is not None
    assert refused.cause is RefusalCause.SLO
    assert refused.retry_after_s == pytest.approx(0.5)
    assert find_hopeless(asked, plan(1.0), view(worker(P)), shed=Shed.DEADLINE) is None
    assert find_hopeless(replace(asked, received_s=49.1), plan(1.0), view(worker(P)), shed=Shed.SLO) is None


def test_objective_without_time_for_the_usual_error_of_predictions_is_missed() -> None:
    asked = request(ttft_slo_s=2.0, time_left_s=1.9)
    assert find_hopeless(asked, plan(1.85), view(worker(P)), shed=Shed.SLO) is None
    refused = find_hopeless(asked, plan(1.85), view(worker(P)), shed=Shed.SLO, error=1.1)
    assert refused is not None
    assert refused.cause is RefusalCause.SLO
    assert find_hopeless(asked, plan(1.85), view(worker(P)), shed=Shed.DEADLINE, error=1.1) is None


@pytest.mark.parametrize("outcome", [plan(None), plan(1e6), NO_PLAN], ids=["silent policy", "prediction", "no plan"])
def test_estimates_no_shedding_and_no_fleet_refuse_no_request(outcome: Plan | Refused) -> None:
    estimate = replace(TIMING, prefill=replace(TIMING.prefill, num_samples=MIN_SAMPLES - 1))
    asked = request(time_left_s=0.001, ttft_slo_s=0.001)
    assert find_hopeless(asked, outcome, view(worker(P, timing=estimate)), shed=Shed.SLO) is None
    assert find_hopeless(asked, outcome, view(worker(P)), shed=Shed.NONE) is None, "shedding is off"
    assert find_hopeless(asked, NO_PLAN, fleet(), shed=Shed.SLO) is None, "an empty fleet is no reason to give up"


@pytest.mark.parametrize(("name", "is_refused"), [("least_load", False), ("least_load_with_forecast", True)])
def test_policy_with_forecast_refuses_what_its_own_worker_would_serve_late(name: str, is_refused: bool) -> None:
    asked = request(ttft_slo_s=3.0)
    idle_decode = fleet(worker(P, queue_s=10.0), worker(D))
    chosen = fleets.choose(fleets.policy(name), asked, idle_decode)

    refused = find_hopeless(asked, chosen, idle_decode, shed=Shed.SLO)

    assert (chosen.prefill, chosen.answering) == (P, D)
    assert (refused is not None) is is_refused
    if refused is not None:
        assert "the first token is predicted in 11.00 s" in refused.reason
