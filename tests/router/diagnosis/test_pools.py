"""A pool in a diagnosis: the walls that share its time, and the predicted gain of another worker or of fewer bits."""

from dataclasses import replace

import pytest

from common.ids import WorkerId
from common.timing import StepModel
from kvrelay.v1 import worker_pb2
from router.diagnosis import changes
from router.diagnosis.pool import DiagnosedPool, DiagnosedWorker
from tests.router.diagnosis.pools import TIMING, make_pool, make_worker

OF_30_MS = replace(TIMING, decode=StepModel(constant_s=0.02, per_decode_s=0.0005, num_samples=100))


def times_of(waits_s: list[float]) -> changes.PromptTimes:
    return changes.PromptTimes(waits_s=waits_s, prefills_s=[1.0] * len(waits_s), alone_s=1.0)


def test_saturated_pool_with_few_requests_tells_that_a_wait_cannot_be_predicted() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=1.0))
    change = changes.one_more_reader(pool, times_of([3.0]))
    assert "100% more prompts per second" in change.text
    assert "cannot be predicted" in change.text
    assert change.predicted is None


def test_saturated_pool_serves_at_twice_the_rate_with_twice_the_workers() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=1.0))
    predicted = changes.one_more_reader(pool, times_of([4.0, 6.0] * 8)).predicted
    assert predicted is not None
    assert (predicted.now, predicted.expected) == pytest.approx((5.0, 2.0))
    assert predicted.low < 2.0 < predicted.high


def test_prompts_that_share_steps_leave_the_wait_uncertain() -> None:
    pool, times = make_pool("prefill", make_worker("p0", busy=1.0)), times_of([5.0] * 16)
    predicted = changes.one_more_reader(pool, replace(times, alone_s=0.5)).predicted
    assert predicted is not None
    assert (predicted.low, predicted.expected, predicted.high) == pytest.approx((2.0, 2.25, 2.5))


def on_shared_cores(pool: DiagnosedPool, *, num_idle: float, num_cores: int = 2) -> DiagnosedPool:
    """Return the pool on a host with that many idle cores, whose workers compute on `num_cores` each."""
    workers = []
    for each in pool.workers:
        status = worker_pb2.WorkerStatus(num_idle_cores=num_idle, device=worker_pb2.DeviceReport(num_cores=num_cores))
        status.MergeFrom(each.status)
        workers.append(replace(each, status=status))
    return replace(pool, workers=tuple(workers))


def test_prefill_worker_that_would_find_no_idle_cores_may_leave_the_wait_as_it_is() -> None:
    pool, times = make_pool("prefill", make_worker("p0", busy=1.0)), times_of([4.0, 6.0] * 8)
    whole = changes.one_more_reader(pool, times).predicted
    half = changes.one_more_reader(on_shared_cores(pool, num_idle=1.0), times)
    none = changes.one_more_reader(on_shared_cores(pool, num_idle=0.0), times).predicted
    assert whole is not None
    assert half.predicted is not None
    assert none is not None
    assert (whole.expected, half.predicted.expected, none.expected) == pytest.approx((2.0, 3.5, 5.0))
    assert (half.predicted.low, half.predicted.high) == pytest.approx((whole.low, 5.0))
    assert "50% more prompts per second; its host has 1.0 idle cores of the 2.0 that it would use" in half.text
    assert changes.one_more_reader(on_shared_cores(pool, num_idle=2.0), times).predicted == whole


def test_decode_worker_without_idle_cores_leaves_a_step_between_its_bounds() -> None:
    pool = make_pool("decode", make_worker("d0", busy=0.5, batch=20.0))  # steps of 30 ms, 15 ms by reading weights
    alone = changes.one_more_decoder(replace(pool, workers=(replace(pool.workers[0], timing=OF_30_MS),))).predicted
    shared = replace(pool, workers=(replace(pool.workers[0], timing=OF_30_MS),))
    change = changes.one_more_decoder(on_shared_cores(shared, num_idle=0.0))
    assert alone is not None
    assert change.predicted is not None
    # 12 ms of weights and 3 ms of KV, of which half stays, and 15 ms that may all be of the batch.
    assert change.predicted.low == pytest.approx(0.012 + 0.0015 + 0.0075)
    assert change.predicted.low < alone.low
    assert change.predicted.expected == alone.expected
    assert change.predicted.high == pytest.approx(2 * alone.expected)
    assert change.text.endswith("by worker and fit; its host has 0.0 idle cores of the 1.0 that it would use)")


def test_worker_that_measured_no_floor_promises_nothing_of_fewer_bits() -> None:
    status = worker_pb2.WorkerStatus(recent_steps=[worker_pb2.StepTotals(window_s=60.0, decode_s=3.0)])
    pool = make_pool("decode", DiagnosedWorker(worker_id=WorkerId("d0"), status=status, timing=TIMING, block_size=16))
    bits = changes.fewer_weight_bits(pool, pool)
    assert bits is not None
    assert "cannot tell" in bits.text


def test_wait_in_an_idle_pool_is_predicted_like_any_other() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=0.0))
    assert "wait 0.2 s → about" in changes.one_more_reader(pool, times_of([0.2])).text


def test_model_that_is_far_off_predicts_no_step() -> None:
    change = changes.one_more_decoder(make_pool("decode", make_worker("d0", busy=5 / 6, batch=1.0)))
    assert change.predicted is None
    assert change.text.endswith("cannot be predicted: steps take 50 ms and their model says 12 ms")


def test_walls_divide_the_time_of_a_pool() -> None:
    pool = make_pool("decode", make_worker("d0", busy=0.8), make_worker("d1", busy=0.4))
    walls = pool.walls
    assert (walls.busy, walls.memory, walls.compute) == pytest.approx((0.6, 0.3, 0.06))
    assert (walls.overhead, walls.waiting, walls.link) == pytest.approx((0.3, 0.4, 0.0))
    assert walls.binds == "waiting"


def test_overhead_is_beyond_the_bound_of_each_kind_of_step() -> None:
    steps = worker_pb2.StepTotals(
        window_s=60.0,
        covered_s=60.0,
        prefill_s=20.0,
        prefill_compute_s=15.0,
        prefill_memory_s=1.0,
        decode_s=20.0,
        decode_memory_s=25.0,
        decode_compute_s=1.0,
    )
    pool = make_pool("decode", replace(make_worker("d0"), status=worker_pb2.WorkerStatus(recent_steps=[steps])))
    assert pool.overhead_share == pytest.approx(5 / 40)
    assert pool.walls.overhead == pytest.approx(5 / 60)


def test_pool_that_was_not_measured_is_bound_by_its_steps() -> None:
    steps = worker_pb2.StepTotals(window_s=60.0, covered_s=60.0, num_decode_steps=1, decode_s=50.0)
    worker = replace(make_worker("d0"), status=worker_pb2.WorkerStatus(recent_steps=[steps]))
    walls = make_pool("decode", worker).walls
    assert (walls.binds, walls.overhead) == ("steps", 0.0)
    assert make_pool("decode", replace(worker, status=worker_pb2.WorkerStatus())).walls.binds == ""
