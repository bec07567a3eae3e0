"""What is done about workers that stay slow, or fail what their peers do not; with processes that are only names."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.changes.change import ChangeKind, Changes
from cluster.health.health_monitor import SUSPICION_PAUSE_S, TRIAL_PAUSE_S, HealthMonitor
from cluster.health.trial import Answers, TrialFailed, compare
from cluster.processes.life import Life, Standing
from cluster.processes.plan import ProcessRole
from cluster.processes.workforce import Workforce
from kvrelay.v1 import router_admin_pb2
from tests.clock import ManualClock
from tests.cluster.support import make_config

DECODE, PREFILL = ProcessRole.DECODE, ProcessRole.PREFILL
RIGHT: Answers = ((1, 2), (3, 4))
WRONG: Answers = ((1, 2), (3, 5))
SLOW_S = 30.0


def member(name: str, role: ProcessRole) -> Any:
    life = Life(num_lives=1)
    life.stand(Standing.MEMBER)
    return SimpleNamespace(name=name, spec=SimpleNamespace(role=role), address=name, generation=(), life=life)


class FakeWorkforce(Workforce):
    """Two decode workers and a prefill worker, and what the routers tell of them."""

    def __init__(self) -> None:
        self.pool = [member("d0", DECODE), member("d1", DECODE), member("p0", PREFILL)]
        self.told: dict[str, dict[str, Any]] = {each.name: {"slowness": 1.0} for each in self.pool}
        self.replaced: list[str] = []
        self.routers: Any = SimpleNamespace(worker_changed=lambda: None, num_users=lambda name: 0, worker_health=[])

    def workers(self, role: ProcessRole) -> list[Any]:
        return [each for each in self.pool if each.spec.role is role]

    def replace_process(self, process: Any, reason: str, *, grace_s: float | None = None) -> None:
        self.replaced.append(f"{process.name}: {reason}")

    def tell(self) -> None:
        """Have the routers report."""
        health = [router_admin_pb2.WorkerHealth(worker_id=name, epoch=1, **of) for name, of in self.told.items()]
        self.routers.worker_health = [health]

    def standing(self, name: str) -> Standing:
        return next(each.life.standing for each in self.pool if each.name == name)  # type: ignore[no-any-return]


@dataclass
class Bench:
    """A health monitor over the fake workforce."""

    workforce: FakeWorkforce = field(default_factory=FakeWorkforce)
    changes: Changes = field(default_factory=Changes)
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))
    answers: dict[str, Answers | TrialFailed | None] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = make_config()
        self.monitor = HealthMonitor(
            self.workforce, self.changes, config=lambda: config, try_=self._try, clock=self.clock
        )

    async def _try(self, address: str) -> Answers | None:
        self.tried.append(address)
        answer = self.answers.get(address, RIGHT)
        if isinstance(answer, TrialFailed):
            raise answer
        return answer

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self.workforce.tell()
            self.monitor.look()
            await self.monitor.settled()

    def fail(self, name: str) -> None:
        """Have a worker stand out by failed attempts."""
        self.workforce.told[name] = {"num_attempts": 10.0, "num_failed": 8.0, "slowness": 1.0}


async def test_slow_worker_drains_is_tried_and_comes_back_when_it_has_recovered() -> None:
    bench = Bench()
    bench.workforce.told["d0"] = {"slowness": 5.0, "is_slow": True}
    await bench.pass_time(SLOW_S)
    assert bench.workforce.standing("d0") is Standing.MEMBER
    assert bench.tried == []
    await bench.pass_time(1 + 3 * TRIAL_PAUSE_S)
    assert bench.workforce.standing("d0") is Standing.DRAINING
    assert set(bench.tried) == {"d0"}
    assert 3 <= len(bench.tried) <= 4
    bench.workforce.told["d0"] = {"slowness": 1.5}
    await bench.pass_time(10)
    assert bench.workforce.standing("d0") is Standing.MEMBER
    assert not bench.workforce.replaced


async def test_worker_that_stays_slow_gets_a_new_process_and_stays_out() -> None:
    bench = Bench()
    bench.workforce.told["d0"] = {"slowness": 5.0, "is_slow": True}
    await bench.pass_time(SLOW_S + 65)
    assert bench.workforce.replaced == ["d0: it stayed slow"]
    assert bench.workforce.standing("d0") is Standing.DRAINING


async def test_pool_that_is_being_changed_is_left_alone() -> None:
    bench, held = Bench(), asyncio.Event()
    bench.workforce.told["d0"] = {"slowness": 5.0, "is_slow": True}

    async def work(report: Callable[[str], None]) -> None:
        await held.wait()

    change = bench.changes.begin(ChangeKind.SCALE, "", [DECODE], work)
    await bench.pass_time(2 * SLOW_S)
    assert bench.workforce.standing("d0") is Standing.MEMBER
    held.set()
    await change.result()
    await bench.pass_time(SLOW_S + 1)
    assert bench.workforce.standing("d0") is Standing.DRAINING


async def test_worker_that_a_change_took_over_is_no_longer_kept_out_by_the_monitor() -> None:
    bench = Bench()
    bench.workforce.told["d0"] = {"slowness": 5.0, "is_slow": True}
    await bench.pass_time(SLOW_S + 1)
    process = bench.workforce.pool[0]
    process.life.stand(Standing.APART)
    bench.workforce.told["d0"] = {"slowness": 1.0}
    await bench.pass_time(20)
    assert bench.workforce.standing("d0") is Standing.APART


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WRONG, "its answers to prompts 1 differ from those of 2 of its peers"),
        (TrialFailed("it has not answered within 20 s"), "it has not answered within 20 s"),
    ],
)
async def test_worker_that_fails_requests_and_its_trial_is_replaced(answer: Any, reason: str) -> None:
    bench = Bench(answers={"d0": answer})
    bench.fail("d0")
    await bench.pass_time(1)
    assert bench.tried == ["d0", "d1", "p0"]
    assert bench.workforce.replaced == [f"d0: failed its trial: {reason}"]


@pytest.mark.parametrize("answer", [RIGHT, None])
async def test_worker_that_passes_its_trial_or_has_no_room_for_it_stays(answer: Answers | None) -> None:
    bench = Bench(answers={"d0": answer})
    bench.fail("d0")
    await bench.pass_time(SUSPICION_PAUSE_S - 1)
    assert bench.tried.count("d0") == 1
    await bench.pass_time(2)
    assert bench.tried.count("d0") == 2
    assert not bench.workforce.replaced


async def test_worker_is_not_blamed_for_what_a_broken_peer_answers() -> None:
    bench = Bench(answers={"d1": TrialFailed("it cannot compute"), "p0": RIGHT})
    bench.fail("d0")
    await bench.pass_time(1)
    assert not bench.workforce.replaced


def test_answers_are_compared_with_those_of_most_peers() -> None:
    compare(RIGHT, [])
    compare(RIGHT, [RIGHT, WRONG, RIGHT])
    with pytest.raises(TrialFailed, match="prompts 1 differ from those of 2"):
        compare(WRONG, [RIGHT, WRONG, RIGHT])
    with pytest.raises(TrialFailed):
        compare(RIGHT[:1], [RIGHT])


async def test_monitor_that_ends_leaves_no_trial_behind() -> None:
    bench = Bench()
    hanging = asyncio.Event()

    async def hang(address: str) -> Answers | None:
        hanging.set()
        await asyncio.Event().wait()
        return None

    bench.monitor = HealthMonitor(bench.workforce, bench.changes, config=make_config, try_=hang, clock=bench.clock)
    bench.fail("d0")
    before = asyncio.all_tasks()
    async with bench.monitor.watching():
        bench.workforce.tell()
        bench.monitor.look()
        await hanging.wait()
    assert asyncio.all_tasks() == before
