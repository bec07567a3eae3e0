"""The autopilot over fake workers: its requests, its reports, and its reaction to failures."""

import asyncio
from dataclasses import replace

import pytest

from cluster.changes.autopilot import Autopilot
from cluster.changes.change import ChangeKind, Changes
from cluster.changes.observing import Ask, RouterReports
from cluster.changes.planning import SizeGuard
from cluster.changes.room import HostRoom
from cluster.changes.scaling import Report, Scaler
from cluster.planner.plan import Observation, Pool, PoolSizes, ScalingPlan
from cluster.processes.plan import ProcessRole, ProcessSpec, make_plan
from common.config import ServingConfig
from common.errors import InvalidRequest
from common.timing import timing_to_proto
from kvrelay.v1 import router_admin_pb2, worker_pb2
from tests.clock import ManualClock
from tests.cluster.planner.support import TIMING, make_demand
from tests.cluster.rollout_bench import HOST, FakeWorkforce
from tests.cluster.support import make_config

PREFILL, DECODE = ProcessRole.PREFILL, ProcessRole.DECODE


class ScriptedPlanner:
    """Returns scripted sizes and records its observations."""

    def __init__(self, *sizes: PoolSizes) -> None:
        self.sizes = list(sizes)
        self.observed: list[Observation] = []

    def plan(self, observed: Observation) -> ScalingPlan:
        self.observed.append(observed)
        return ScalingPlan(sizes=self.sizes.pop(0), reason="because", terms=(("load", 0.5),))


class Bench:
    """A cluster of one prefill and one decode worker, and an autopilot with a scripted planner."""

    def __init__(self, *sizes: PoolSizes, mode: str = "act") -> None:
        self.config: ServingConfig = make_config(
            planner={"mode": mode, "interval_s": 10.0}, router={"local_prefill_max_tokens": 32}
        )
        self.workforce = FakeWorkforce()
        self.scaler = Scaler(self.config, self.workforce, lambda config: make_plan(config, HOST))
        self.planner = ScriptedPlanner(*sizes)
        self.clock = ManualClock(100.0)
        self.reports: RouterReports | None = None
        self.changes = Changes(clock=self.clock)
        self.autopilot = self.pilot(self.ask)

    def pilot(self, ask: Ask) -> Autopilot:
        return Autopilot(
            self.scaler,
            self.workforce,
            self.changes,
            planner=self.planner,
            ask=ask,
            clock=self.clock,
        )

    async def ask(self, window_s: float) -> RouterReports | None:
        return self.reports

    async def begin(self) -> None:
        await self.scaler.scale({PREFILL: 1, DECODE: 1}, grace_s=1.0, report=lambda _text: None)
        self.report()

    def report(self, *, rate: float = 5.0) -> None:
        """Have the routers report the present workers."""
        conditions = {
            process.spec.name: router_admin_pb2.WorkerCondition(
                worker_id=process.spec.name,
                is_serving=True,
                block_size=16,
                load=worker_pb2.LoadReport(num_blocks=20_000, num_free_blocks=20_000),
                timing=timing_to_proto(TIMING, {}),
            )
            for role in (PREFILL, DECODE)
            for process in self.workforce.workers(role)
        }
        self.reports = RouterReports(demand=make_demand(rate=rate, window_s=60.0), conditions=conditions)

    async def step(self) -> str:
        """Plan once and wait for the change; returns the outcome."""
        await self.autopilot.step()
        await self.autopilot.settled()
        assert self.autopilot.latest is not None
        return self.autopilot.latest.outcome

    def sizes(self) -> tuple[int, int]:
        sizes = self.scaler.sizes()
        return sizes[PREFILL], sizes[DECODE]


async def begun(*sizes: PoolSizes, mode: str = "act") -> Bench:
    """Return a bench whose two workers serve and are known to the routers."""
    bench = Bench(*sizes, mode=mode)
    await bench.begin()
    return bench


def sizes(prefill: int, decode: int) -> PoolSizes:
    return PoolSizes(prefill=prefill, decode=decode)


async def test_act_carries_a_plan_out_and_reports_it() -> None:
    bench = await begun(sizes(2, 3), sizes(2, 3))
    assert (await bench.step()).startswith("done in")
    assert bench.sizes() == (2, 3)
    bench.report()
    assert await bench.step() == ""
    changes = bench.autopilot.response().changes
    assert [(each.prefill.wanted, each.decode.wanted) for each in changes] == [(2, 3)]
    registry = bench.autopilot.gauges.registry
    assert registry.get_sample_value("kvrelay_pool_workers_wanted", {"pool": "decode"}) == 3
    assert registry.get_sample_value("kvrelay_planner_changes_total", {"outcome": "done"}) == 1
    # Prometheus' increase() sees the first failure only as a step from 0.
    assert registry.get_sample_value("kvrelay_planner_changes_total", {"outcome": "failed"}) == 0


async def test_advise_changes_nothing_and_says_what_it_would() -> None:
    bench = await begun(sizes(2, 3), mode="advise")
    assert "advised only" in await bench.step()
    assert bench.sizes() == (1, 1)


async def test_planner_observes_measured_times_and_every_worker() -> None:
    bench = await begun(sizes(1, 1))
    bench.scaler.start_times.note(PREFILL, 40.0)
    bench.scaler.start_times.note(PREFILL, 60.0)
    await bench.step()
    observed = bench.planner.observed[0]
    assert observed.startup_s[Pool.PREFILL] == pytest.approx(40.0), "the median of 0, 40 and 60"
    assert [worker.worker_id for worker in observed.workers] == ["prefill-0", "decode-0"]
    assert observed.workers[1].timing == replace(TIMING, links={})
    assert observed.workers[1].max_running == bench.config.pools.decode.max_running


async def test_worker_that_no_router_knows_yet_is_starting() -> None:
    bench = await begun(sizes(1, 1))
    bench.reports = RouterReports(demand=make_demand(rate=1.0), conditions={})
    await bench.step()
    assert {worker.phase for worker in bench.planner.observed[0].workers} == {"starting"}


async def test_failed_start_is_reported_and_retried_after_a_growing_pause() -> None:
    bench = await begun(*[sizes(2, 1)] * 5)
    bench.workforce.fails = lambda spec: True
    assert "failed, pause of 10 s" in await bench.step()
    assert await bench.step() == "waits 10 s: the last growth failed"
    bench.clock.advance(10.0)
    assert "failed, pause of 20 s" in await bench.step()
    bench.clock.advance(20.0)
    bench.workforce.fails = lambda spec: False
    assert (await bench.step()).startswith("done")
    assert bench.sizes() == (2, 1)


async def test_plan_waits_for_an_operators_change_of_its_pool_but_not_of_the_other() -> None:
    bench = await begun(sizes(2, 1), sizes(1, 2))

    async def last_for_ever(_report: Report) -> None:
        await asyncio.Event().wait()

    bench.changes.begin(ChangeKind.SCALE, "prefill=5", [PREFILL], last_for_ever)
    assert await bench.step() == "waits: change 1 (scale prefill=5) is under way"
    assert (await bench.step()).startswith("done in")
    assert bench.sizes() == (1, 2)
    await bench.changes.close()


async def test_cancelled_plan_is_not_made_again_at_once() -> None:
    bench = await begun(sizes(2, 1), sizes(2, 1))
    bench.workforce.blocked.add("+prefill-1")
    await bench.autopilot.step()
    await bench.workforce.begun.wait()

    bench.changes.cancel(bench.changes[1])
    await bench.autopilot.settled()

    assert "failed, pause of 10 s: change 1 was cancelled" in bench.autopilot.response().latest.outcome
    assert await bench.step() == "waits 10 s: the last growth failed"
    assert bench.sizes() == (1, 1)


async def test_plan_while_a_change_is_under_way_does_not_begin_another() -> None:
    bench = await begun(sizes(2, 1), sizes(3, 1))
    await bench.autopilot.step()
    await bench.autopilot.step()
    assert bench.autopilot.latest is not None
    assert bench.autopilot.latest.outcome == "waits: change 1 (planner prefill=2) is under way"
    await bench.autopilot.settled()
    assert bench.sizes() == (2, 1)


async def test_silent_routers_make_no_plan() -> None:
    bench = await begun()
    bench.reports = None
    await bench.autopilot.step()
    assert bench.autopilot.latest is None


async def test_autopilot_plans_at_every_interval_until_it_is_stopped() -> None:
    bench = Bench(*[sizes(1, 1)] * 10_000)
    bench.config = bench.config.model_copy(
        update={"planner": bench.config.planner.model_copy(update={"interval_s": 0.001})}
    )
    bench.scaler.adopt(bench.config)
    await bench.begin()
    stopping, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def ask(window_s: float) -> RouterReports | None:
        asked.release()
        return bench.reports

    pilot = bench.pilot(ask)
    async with asyncio.timeout(60), pilot.running(stopping):
        await asked.acquire()
        await asked.acquire()
        stopping.set()
    assert pilot.latest is not None


async def test_plan_response_contains_everything() -> None:
    bench = await begun(sizes(2, 1), mode="advise")
    await bench.step()
    bench.clock.advance(7.0)
    response = bench.autopilot.response()
    assert (response.mode, response.latest.age_s, response.latest.reason) == ("advise", 7.0, "because")
    assert (response.latest.prefill.present, response.latest.prefill.wanted) == (1, 2)
    assert [(term.name, term.value) for term in response.latest.terms] == [("load", 0.5)]
    assert len(response.changes) == 1


# The guard.

ROOM = HostRoom(num_workers=8, cores=3, free_bytes=2 << 30, worker_bytes=400 << 20)
"""Room for four more."""


async def guarded() -> tuple[Bench, SizeGuard]:
    """Return a bench of four workers in each pool and the guard of its sizes."""
    bench = await begun()
    await bench.scaler.scale({PREFILL: 4, DECODE: 4}, grace_s=1.0, report=lambda _text: None)
    return bench, SizeGuard(
        scaler=bench.scaler,
        workforce=bench.workforce,
        ask=bench.ask,
        clock=bench.clock,
        measure_room=lambda _workers, _pools: ROOM,
    )


async def test_guard_refuses_sizes_below_the_load_with_the_numbers() -> None:
    bench, guard = await guarded()
    bench.report(rate=10.0)
    await guard.check({PREFILL: 4, DECODE: 5})
    with pytest.raises(InvalidRequest, match=r"1 prefill workers would carry .* and 10\.00 came .*--force"):
        await guard.check({PREFILL: 1})


async def test_guard_without_load_or_evidence_allows_everything() -> None:
    bench, guard = await guarded()
    bench.report(rate=0.0)
    await guard.check({PREFILL: 1, DECODE: 1})
    bench.reports = None
    await guard.check({PREFILL: 1, DECODE: 1})


async def test_guard_refuses_more_workers_than_fit_with_the_number_that_does() -> None:
    bench, guard = await guarded()
    bench.reports = None
    await guard.check({PREFILL: 4, DECODE: 8})
    await guard.check({PREFILL: 1, DECODE: 11})
    with pytest.raises(InvalidRequest, match=r"999 decode .* 3 cores and 2\.0 GiB .* at most 8, .*--force") as at:
        await guard.check({DECODE: 999})
    assert at.value.field == "decode"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 12),
        ({"worker_bytes": 1 << 30}, 9),  # memory
        ({"cores": 64, "worker_bytes": 0}, 256),
        ({"cores": 1}, 8),  # those that are there stay
        ({"free_bytes": 0}, 8),
    ],
)
def test_room_of_a_host_is_what_cores_and_memory_leave(fields: dict[str, int], expected: int) -> None:
    assert replace(ROOM, **fields).num_fitting == expected


async def test_workers_start_a_few_at_a_time_on_one_host_and_say_how_warm_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = await begun()
    reports: list[str] = []
    starting: set[str] = set()
    add, most = bench.workforce.add_worker, 0

    async def add_worker(spec: ProcessSpec, report: Report) -> int:
        nonlocal most
        starting.add(spec.name)
        most = max(most, len(starting))
        for _ in range(3):
            await asyncio.sleep(0)
        starting.remove(spec.name)
        return await add(spec, report) + 7

    monkeypatch.setattr(bench.workforce, "add_worker", add_worker)
    await bench.scaler.scale({DECODE: 12}, grace_s=1.0, report=reports.append)
    assert 1 < most <= 4, "a host that starts all at once has no memory and no core left for those that serve"
    assert "decode-11 warmed with 7 blocks" in reports[-1]
