import random
from collections.abc import Sequence

import pytest

from cluster.planner.plan import Observation, Pool, PoolSizes, ScalingPlan, WorkerPhase
from measure.simulate.cluster import run
from measure.simulate.records import Elasticity, SimRun, Stay
from tests.measure.simulate.builders import make_arrivals, make_settings, make_shape

COUNT = 60
"""Requests of a run; they come in three seconds."""


class Scripted:
    """Plans the next sizes of a list at every interval, and then the last ones."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes = list(sizes)
        self.seen: list[Observation] = []

    def plan(self, observed: Observation) -> ScalingPlan:
        self.seen.append(observed)
        prefill, decode = self._sizes.pop(0) if len(self._sizes) > 1 else self._sizes[0]
        return ScalingPlan(sizes=PoolSizes(prefill=prefill, decode=decode), reason="scripted")


def run_scripted(
    sizes: Sequence[tuple[int, int]], *, count: int = COUNT, flip_s: float | None = None, grace_s: float = 60.0
) -> tuple[SimRun, Scripted]:
    planner = Scripted(sizes)
    elasticity = Elasticity(
        make_planner=lambda: planner, interval_s=1.0, startup_s=1.5, flip_s=flip_s, grace_s=grace_s, demand_window_s=2.5
    )
    finished = run(make_shape(2, 2), make_settings(elasticity=elasticity), make_arrivals(count))
    return finished, planner


def assert_all_answered(finished: SimRun, count: int = COUNT) -> None:
    arrivals = make_arrivals(count)
    assert len(finished.requests) == count
    for result, arrival in zip(finished.requests, arrivals, strict=True):
        assert result.is_complete, result
        assert result.num_output_tokens == arrival.num_output_tokens


def stays_of(finished: SimRun, pool: Pool) -> list[Stay]:
    return [stay for stay in finished.stays if stay.pool is pool]


def test_pools_when_asked_for_more_pay_from_then_and_serve_after_the_start_up() -> None:
    finished, planner = run_scripted([(3, 2)])

    new = stays_of(finished, Pool.PREFILL)[2]
    assert (new.asked_s, new.serving_s, new.gone_s) == (1.0, 2.5, None)
    assert new.paid_s(until_s=10.0) == 9.0
    assert [w.phase for w in planner.seen[1].workers if w.worker_id == new.worker_id] == [WorkerPhase.STARTING]
    assert [w.phase for w in planner.seen[2].workers if w.worker_id == new.worker_id] == [WorkerPhase.SERVING]
    assert any(result.server.prefill_worker == new.worker_id for result in finished.requests)
    assert_all_answered(finished)


def test_pools_when_asked_for_fewer_move_answers_and_lose_no_token() -> None:
    finished, _ = run_scripted([(1, 1)])

    gone = [stay for stay in finished.stays if stay.gone_s is not None]
    assert [stay.worker_id for stay in gone] == ["prefill-1", "decode-1"]
    for stay in gone:
        assert stay.leaving_s == 1.0
        assert stay.gone_s is not None and 1.0 <= stay.gone_s < 5.0
    assert finished.num_moves > 0
    assert max(result.server.num_attempts or 0 for result in finished.requests) > 1
    assert not any(result.due_s > 1.1 and result.server.decode_worker == "decode-1" for result in finished.requests)
    assert_all_answered(finished)


def test_pools_when_a_start_is_not_wanted_any_more_pay_for_it_until_then() -> None:
    finished, _ = run_scripted([(2, 3), (2, 2)])

    (called_off,) = [stay for stay in finished.stays if stay.gone_s is not None]
    assert (called_off.asked_s, called_off.serving_s, called_off.gone_s) == (1.0, None, 2.0)
    assert_all_answered(finished)


def test_pools_when_one_shrinks_and_the_other_grows_flip_a_worker_that_is_paid_once() -> None:
    finished, _ = run_scripted([(1, 3)], flip_s=0.5)

    left, taken = stays_of(finished, Pool.PREFILL)[1], stays_of(finished, Pool.DECODE)[2]
    assert taken.is_flipped and not left.is_flipped
    assert left.worker_id == taken.worker_id
    assert left.gone_s == taken.asked_s == 1.0
    assert taken.serving_s is not None and 1.5 <= taken.serving_s < 2.5  # far below the start-up time
    assert len(finished.stays) == 5
    assert_all_answered(finished)


def test_pools_when_a_flip_is_not_wanted_any_more_lose_the_worker() -> None:
    finished, _ = run_scripted([(1, 3), (1, 2)], flip_s=1.5)

    taken = stays_of(finished, Pool.DECODE)[2]
    assert taken.serving_s is None
    assert taken.gone_s is not None
    assert_all_answered(finished)


def test_pools_when_the_grace_is_over_stop_the_worker_and_answers_go_on_elsewhere() -> None:
    finished, _ = run_scripted([(2, 1)], grace_s=0.0)

    gone = stays_of(finished, Pool.DECODE)[1]
    assert gone.leaving_s == 1.0
    assert gone.gone_s == pytest.approx(1.0, abs=1e-6)
    assert_all_answered(finished)


@pytest.mark.parametrize("seed", range(2))
def test_pools_that_change_all_the_time_answer_all_requests(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [(draw.randrange(1, 5), draw.randrange(1, 5)) for _ in range(12)]

    finished, planner = run_scripted(sizes, count=100, flip_s=0.5)

    assert_all_answered(finished, 100)
    asked = [PoolSizes(prefill=prefill, decode=decode) for prefill, decode in sizes]
    for observed, wanted in zip(planner.seen[1:], asked, strict=False):
        assert observed.sizes == wanted  # what was asked for is under way at once
    for observed in planner.seen:
        assert observed.demand.num_arrived > 0 or observed.now_s > 7.5
