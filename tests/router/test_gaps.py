"""Decode workers that another answer would slow down too much: it waits.

The fleet's timing: 10 ms plus a millisecond per sequence between tokens.
"""

from dataclasses import replace
from typing import Any

import pytest

from common.errors import RefusalCause, Refused
from common.timing import MIN_SAMPLES
from router.placement.plans import Plan, TooSlow
from tests.router.fleets import TIMING, fleet, policy, request, worker


def outcome(num_decodes: int, *, running: float, own: float, gap_error: float = 1.0, **fields: Any) -> Plan | Refused:
    """Return the answer of the policy about one decode worker, whose answers have the objective `running`."""
    slos = (running,) if num_decodes else ()
    load = worker("d0", num_decodes=num_decodes, num_sequences=num_decodes, tpot_slos=slos, **fields)
    return policy("predictive").choose(request(tpot_slo_s=own, gap_error=gap_error), fleet(load))


@pytest.mark.parametrize(
    ("running_s", "own_s", "cause"),
    [
        (0.020, 10.0, RefusalCause.SATURATED),
        (0.020, 0.020, RefusalCause.SATURATED),
        (10.0, 0.020, RefusalCause.NO_ROOM),  # others that wait may have more time
    ],
)
def test_request_waits_while_answers_would_miss_their_objective(
    running_s: float, own_s: float, cause: RefusalCause
) -> None:
    assert isinstance(outcome(9, running=running_s, own=own_s), Plan)  # 20 ms
    refused = outcome(10, running=running_s, own=own_s)
    assert isinstance(refused, TooSlow)
    assert refused.cause is cause
    assert not refused.is_final


def test_worker_is_filled_to_what_most_gaps_were_in_the_end() -> None:
    assert isinstance(outcome(7, running=0.020, own=0.020, gap_error=1.1), Plan)  # 18 ms, 19.8 with the usual error
    assert isinstance(outcome(8, running=0.020, own=0.020, gap_error=1.1), Refused)


def test_other_worker_takes_what_one_may_not() -> None:
    full = worker("d0", num_decodes=10, num_sequences=10, tpot_slos=(0.020,), prefill_free_at_s=0.0)
    busy = worker("d1", num_decodes=2, num_sequences=2, tpot_slos=(0.020,), prefill_free_at_s=0.05)
    plan = policy("predictive").choose(request(tpot_slo_s=0.020), fleet(full, busy))
    assert isinstance(plan, Plan)
    assert plan.answering == "d1"


def test_request_whose_objective_no_worker_can_keep_does_not_wait() -> None:
    assert isinstance(outcome(0, running=0.020, own=0.001), Plan)
    assert isinstance(outcome(5, running=1.0, own=0.001), Plan)


def test_worker_without_measurements_is_open() -> None:
    unknown = replace(TIMING, decode=replace(TIMING.decode, num_samples=MIN_SAMPLES - 1))
    assert isinstance(outcome(1000, running=0.020, own=0.020, timing=unknown), Plan)


@pytest.mark.parametrize("name", ["predictive", "least_load"])
def test_worker_whose_batch_is_full_is_not_tried(name: str) -> None:
    nearly_full = worker("d0", num_free_slots=1, num_sequences=7)
    refused = policy(name).choose(request(num_samples=2), fleet(nearly_full))
    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.NO_ROOM
    assert isinstance(policy(name).choose(request(num_samples=1), fleet(nearly_full)), Plan)
    refused = policy(name).choose(request(num_samples=1), fleet(worker("d0", num_free_slots=0, num_sequences=8)))
    assert isinstance(refused, Refused)
    assert refused.cause is RefusalCause.SATURATED
    lone = worker("d0", num_free_slots=1, num_sequences=0)
    assert isinstance(policy(name).choose(request(num_samples=2), fleet(lone)), Plan)
