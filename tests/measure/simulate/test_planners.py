from dataclasses import replace

import pytest

from cluster.planner.plan import Observation, ObservedWorker, Planner, Pool, PoolSizes, WorkerPhase
from common.demand import RequestShape
from common.slo import Slo
from common.timing import StepModel, TimingModel
from measure.simulate.planners import (
    DynamoLoad,
    DynamoLoadSettings,
    PlannerError,
    QueueLength,
    QueueLengthSettings,
    planning_by,
)
from tests.cluster.planner import support

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.0, per_prefill_token_s=1e-4),
    decode=StepModel(constant_s=0.01, per_decode_s=1e-3),
    max_step_tokens=512,
)
"""A prompt of 10,000 tokens takes a second; a decode step 10 ms and a millisecond for each sequence."""


def make_worker(number: int, pool: Pool, phase: WorkerPhase = WorkerPhase.SERVING, **load: int) -> ObservedWorker:
    worker = support.make_worker(pool, number, phase)
    return replace(worker, timing=worker.timing and TIMING, **load)  # type: ignore[arg-type]


def observe(
    *workers: ObservedWorker, now_s: float = 0.0, num_queued: int = 0, num_queued_tokens: int = 0
) -> Observation:
    shape = RequestShape(num_prompt_tokens=2000, num_computed_tokens=1000, num_output_tokens=100)
    demand = support.make_demand(rate=1.0, shapes=(shape,))
    demand = replace(demand, num_queued=num_queued, num_queued_tokens=num_queued_tokens)
    return replace(support.make_observation(now_s, demand, PoolSizes(prefill=0, decode=0)), workers=workers)


def pools(num_prefill: int = 2, num_decode: int = 2, *, prefill_running: int = 0, decode_running: int = 0) -> tuple:  # type: ignore[type-arg]
    return (
        *(make_worker(i, Pool.PREFILL, num_running=prefill_running) for i in range(num_prefill)),
        *(make_worker(i, Pool.DECODE, num_running=decode_running) for i in range(num_decode)),
    )


def sizes_over_time(planner: Planner, observed: list[Observation]) -> list[tuple[int, int]]:
    plans = [planner.plan(each).sizes for each in observed]
    return [(sizes.prefill, sizes.decode) for sizes in plans]


def make_queue_length() -> QueueLength:
    settings = QueueLengthSettings(target_ongoing_requests=4.0)
    return QueueLength(settings, settings)


def test_queue_length_rule_grows_only_after_the_upscale_delay() -> None:
    busy = pools(2, 2, prefill_running=10, decode_running=4)

    sizes = sizes_over_time(make_queue_length(), [observe(*busy, now_s=now_s) for now_s in (0.0, 15.0, 30.0)])

    assert sizes == [(2, 2), (2, 2), (5, 2)]  # 20 requests for 4 each; decode has what it wants


def test_queue_length_counts_the_line_as_the_prefill_pools() -> None:
    observed = [observe(*pools(1, 1), now_s=now_s, num_queued=9) for now_s in (0.0, 30.0)]

    assert sizes_over_time(make_queue_length(), observed)[-1] == (3, 1)


def test_queue_length_shrinks_only_after_the_downscale_delay() -> None:
    idle = [observe(*pools(4, 4, decode_running=4), now_s=now_s) for now_s in (0.0, 599.0, 600.0)]

    assert sizes_over_time(make_queue_length(), idle) == [(4, 4), (4, 4), (1, 4)]


def make_dynamo() -> DynamoLoad:
    return DynamoLoad(DynamoLoadSettings(ttft_s=1.0, itl_s=0.03, sensitivity=0.5))


@pytest.mark.parametrize(
    ("pending", "expected"),
    [((9_001, 20_000), 3), ((9_000, 20_000), 2), ((4_500, 20_000), 2), ((3_999, 3_999), 1), ((3_999, 4_000), 2)],
    ids=["all above", "one at the objective", "one above", "all below", "one not below"],
)
def test_dynamo_load_prefill_steps_only_when_all_workers_agree(pending: tuple[int, int], expected: int) -> None:
    # One more prompt computes 1,000 tokens: 0.1 s.
    workers = [make_worker(i, Pool.PREFILL, num_pending_prefill_tokens=tokens) for i, tokens in enumerate(pending)]

    plan = make_dynamo().plan(observe(*workers, make_worker(0, Pool.DECODE, num_running=10)))

    assert plan.sizes == PoolSizes(prefill=expected, decode=1)


@pytest.mark.parametrize(("running", "expected"), [((21, 30), 3), ((20, 30), 2), ((4, 4), 1), ((4, 5), 2)])
def test_dynamo_load_decode_steps_only_when_all_workers_agree(running: tuple[int, int], expected: int) -> None:
    workers = [make_worker(i, Pool.DECODE, num_running=count) for i, count in enumerate(running)]

    assert make_dynamo().plan(observe(make_worker(0, Pool.PREFILL), *workers)).sizes.decode == expected


def test_dynamo_load_gives_each_worker_its_share_of_the_line() -> None:
    workers = [make_worker(i, Pool.PREFILL) for i in range(2)]
    decode = make_worker(0, Pool.DECODE, num_running=10)

    assert make_dynamo().plan(observe(*workers, decode, num_queued_tokens=18_000)).sizes.prefill == 2
    assert make_dynamo().plan(observe(*workers, decode, num_queued_tokens=18_002)).sizes.prefill == 3


@pytest.mark.parametrize("phase", [WorkerPhase.STARTING, WorkerPhase.DRAINING])
def test_dynamo_load_while_a_change_is_pending_holds(phase: WorkerPhase) -> None:
    late = make_worker(0, Pool.PREFILL, num_pending_prefill_tokens=50_000)
    changing = make_worker(1, Pool.PREFILL, phase)
    num_paid = 2 if phase is WorkerPhase.STARTING else 1

    plan = make_dynamo().plan(observe(late, changing, make_worker(0, Pool.DECODE, num_running=10)))

    assert plan.sizes == PoolSizes(prefill=num_paid, decode=1)


SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def test_planner_is_named_with_its_numbers_and_what_differs_from_the_usual_changes() -> None:
    elasticity = planning_by("ours:0.99+noflip+startup=240", SLO)
    assert (elasticity.slo, elasticity.flip_s, elasticity.startup_s) == (SLO, None, 240.0)
    assert planning_by("ours", SLO).flip_s is not None
    assert isinstance(planning_by("ray:2:16:120", SLO).make_planner(), QueueLength)
    assert isinstance(planning_by("dynamo:0.8", SLO).make_planner(), DynamoLoad)


@pytest.mark.parametrize("name", ["", "5P2D", "ray:2", "ray:a:b", "dynamo", "ours:x", "ours+flip", "theirs"])
def test_unknown_planner_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PlannerError, match=r"is not a planner; say ours, ours:0.9, ray:2:16 or dynamo:0.8"):
        planning_by(name, SLO)
