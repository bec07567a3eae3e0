"""When slow workers are kept out, used again or replaced, on a clock that the test moves."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.health.slow_workers import (
    REPLACE_S,
    RETURN_S,
    UNMEASURED_S,
    SlowWorkerAction,
    SlowWorkers,
    WorkerObservation,
)
from cluster.health.worker_health import WorkerHealth
from tests.clock import ManualClock

SLOW_S = 30.0
SLOW = WorkerHealth(slowness=5.0, is_slow=True)
WELL = WorkerHealth(slowness=1.0)
UNMEASURED = WorkerHealth()


def worker(name: str, health: WorkerHealth | None = WELL, **changes: object) -> WorkerObservation:
    usual = WorkerObservation(
        name=name, pool="one", slow_drain_s=SLOW_S, is_in_use=True, is_kept_out=False, is_empty=True, health=health
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@dataclass
class Pool:
    """Workers by name, looked at every second; actions are carried out at once."""

    workers: dict[str, WorkerObservation]
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))
    actions: list[tuple[str, SlowWorkerAction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = SlowWorkers(self.clock)

    def set(self, name: str, health: WorkerHealth | None, **changes: object) -> None:
        self.workers[name] = replace(self.workers[name], health=health, **changes)  # type: ignore[arg-type]

    def run(self, seconds: float) -> list[tuple[str, SlowWorkerAction]]:
        """Let time pass; returns the actions given meanwhile."""
        given_before = len(self.actions)
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            for name, action in self.watch.look(list(self.workers.values())).items():
                self.actions.append((name, action))
                if action is not SlowWorkerAction.REPLACE:
                    is_out = action is SlowWorkerAction.KEEP_OUT
                    self.workers[name] = replace(self.workers[name], is_kept_out=is_out, is_in_use=not is_out)
        return self.actions[given_before:]


def pool(**health: WorkerHealth | None) -> Pool:
    return Pool({name: worker(name, each) for name, each in health.items()})


def kept_out() -> Pool:
    """Return a pool whose first worker has just been kept out."""
    here = pool(d0=SLOW, d1=WELL)
    assert here.run(SLOW_S + 1) == [("d0", SlowWorkerAction.KEEP_OUT)]
    return here


def test_worker_that_stays_slow_is_kept_out_and_a_briefly_slow_one_is_not() -> None:
    here = pool(d0=SLOW, d1=WELL)
    assert here.run(SLOW_S) == []
    here.set("d0", WELL)
    assert here.run(1) == []
    here.set("d0", SLOW)
    assert here.run(SLOW_S) == []
    assert here.run(1) == [("d0", SlowWorkerAction.KEEP_OUT)]


def test_recovered_worker_is_used_again_once_it_has_been_well_for_a_while() -> None:
    here = kept_out()
    here.set("d0", WELL)
    assert here.run(RETURN_S) == []
    here.set("d0", SLOW)
    assert here.run(2) == []
    here.set("d0", WELL)
    assert here.run(RETURN_S + 1) == [("d0", SlowWorkerAction.TAKE_BACK)]


def test_worker_that_stays_slow_gets_new_processes_ever_less_often() -> None:
    here = kept_out()
    assert here.run(REPLACE_S - 1) == []
    assert here.run(1) == [("d0", SlowWorkerAction.REPLACE)]
    assert here.run(2 * REPLACE_S - 1) == []
    assert here.run(1) == [("d0", SlowWorkerAction.REPLACE)]
    assert here.run(4 * REPLACE_S - 1) == []


def test_worker_keeps_its_process_while_requests_are_still_on_it() -> None:
    here = kept_out()
    here.set("d0", SLOW, is_empty=False)
    assert here.run(2 * REPLACE_S) == []
    here.set("d0", SLOW, is_empty=True)
    assert here.run(1) == [("d0", SlowWorkerAction.REPLACE)]


def test_worker_that_no_trial_can_measure_is_not_kept_out_for_good() -> None:
    here = kept_out()
    here.set("d0", UNMEASURED)
    assert here.run(UNMEASURED_S - 1) == []
    assert here.run(1) == [("d0", SlowWorkerAction.TAKE_BACK)]


def test_last_worker_that_is_well_and_serves_bounds_what_is_kept_out() -> None:
    for other in (SLOW, None):
        assert pool(d0=SLOW, d1=other).run(2 * SLOW_S) == []
    alone = Pool({"d0": worker("d0", SLOW), "d1": worker("d1", WELL, is_in_use=False)})
    assert alone.run(2 * SLOW_S) == []
    other_model = Pool({"d0": worker("d0", SLOW), "d1": worker("d1", WELL, pool="two")})
    assert other_model.run(2 * SLOW_S) == []


def test_no_worker_is_kept_out_where_the_configuration_says_never() -> None:
    here = Pool({"d0": worker("d0", SLOW, slow_drain_s=None), "d1": worker("d1")})
    assert here.run(10 * SLOW_S) == []


@given(st.lists(st.tuples(st.sampled_from(("d0", "d1", "d2")), st.sampled_from((SLOW, WELL, UNMEASURED, None)))))
def test_pool_always_keeps_a_worker_in_use_and_forgets_no_one(steps: list[tuple[str, WorkerHealth | None]]) -> None:
    here = pool(d0=WELL, d1=WELL, d2=WELL)
    for name, health in steps:
        here.set(name, health)
        here.run(20)
        assert any(each.is_in_use for each in here.workers.values())
    for name in here.workers:
        here.set(name, WELL)
    here.run(RETURN_S + 2)
    assert all(each.is_in_use for each in here.workers.values())
