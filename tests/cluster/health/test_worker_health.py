"""Which workers stand out by failed attempts, from the reports of several routers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.health.worker_health import FACTOR, MIN_FAILED, MIN_SHARE, WorkerHealth, find_failing, merge
from kvrelay.v1 import router_admin_pb2


def told(*, epoch: int = 1, attempts: float = 0, failed: float = 0, slowness: float = 0) -> Any:
    """Return what a router tells of worker d0."""
    return router_admin_pb2.WorkerHealth(
        worker_id="d0", epoch=epoch, num_attempts=attempts, num_failed=failed, slowness=slowness, is_slow=slowness >= 3
    )


def counts(**workers: tuple[float, float]) -> dict[str, WorkerHealth]:
    return {
        name: WorkerHealth(num_attempts=attempts, num_failed=failed) for name, (attempts, failed) in workers.items()
    }


def test_attempts_of_all_routers_count_together_and_most_of_them_decide_who_is_slow() -> None:
    reports = [
        [told(attempts=3, failed=1, slowness=4)],
        [told(attempts=5, failed=2, slowness=3)],
        [told(attempts=1, slowness=2.9)],
    ]
    assert merge(reports) == {"d0": WorkerHealth(num_attempts=9, num_failed=3, slowness=4, is_slow=True)}
    assert not merge([reports[0], reports[2]])["d0"].is_slow


def test_router_that_still_knows_an_earlier_life_does_not_count() -> None:
    merged = merge([[told(epoch=2, attempts=3)], [told(epoch=2)], [told(attempts=9, failed=9)]])
    assert merged == {"d0": WorkerHealth(num_attempts=3)}


def test_worker_that_fails_what_its_peers_do_not_is_found() -> None:
    assert find_failing(counts(d0=(10, 5), d1=(10, 0), d2=(10, 1))) == ["d0"]
    assert find_failing(counts(d0=(10, 5))) == ["d0"]


def test_no_worker_is_blamed_when_all_fail_or_few_attempts_tell_nothing() -> None:
    assert find_failing(counts(d0=(10, 6), d1=(10, 5), d2=(10, 4))) == []
    assert find_failing(counts(d0=(3, 3), d1=(10, 0))) == []
    assert find_failing(counts(d0=(100, 5), d1=(100, 0))) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=5))
def test_found_workers_have_failed_enough_and_more_than_the_others(pool: list[tuple[float, float]]) -> None:
    workers = counts(**{f"d{idx}": (attempts, attempts * share) for idx, (attempts, share) in enumerate(pool)})
    for name in find_failing(workers):
        one = workers[name]
        others = [each for other, each in workers.items() if other != name]
        usual = sum(each.num_failed for each in others) / max(1e-9, sum(each.num_attempts for each in others))
        assert one.num_failed >= MIN_FAILED
        assert one.num_failed / one.num_attempts >= max(MIN_SHARE, FACTOR * usual * (1 - 1e-6))
