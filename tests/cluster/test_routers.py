"""Several routers: each is told everything, and a condition must hold at all that serve."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.routers import Routers
from common.config import RouterConfig
from common.ports import free_ports, is_port_free
from kvrelay.v1 import router_admin_pb2, worker_pb2
from kvrelay.v1.controller_pb2 import GetPlanResponse
from tests.clock import ManualClock
from tests.cluster.support import RecordingRouter, recording_router
from tests.trust import CONTROLLER

_TIMEOUT_S = 60.0
_SILENT_S = 10.0
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
BOTH = ("router-0", "router-1")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a router take its time: a push that is given up was received, but its answer does not count."""
    monkeypatch.setattr("cluster.processes.routers._TIMEOUT_S", _TIMEOUT_S)


@dataclass
class Pair:
    routers: Routers
    clock: ManualClock
    fakes: tuple[RecordingRouter, RecordingRouter]
    ports: tuple[int, int]

    def up(self, index: int) -> None:
        address = f"0.0.0.0:{self.ports[index]}"
        self.routers.router_changed(f"router-{index}", address, address)

    def down(self, index: int) -> None:
        self.routers.router_changed(f"router-{index}", None, None)


def membership(router: str) -> router_admin_pb2.SetWorkersRequest:
    workers = [
        router_admin_pb2.WorkerEndpoint(worker_id=name, role=worker_pb2.WORKER_ROLE_DECODE, address=f"{name}:1")
        for name in ("decode-0", "decode-1")
    ]
    return router_admin_pb2.SetWorkersRequest(workers=workers)


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Run two routers, both up."""
    async with recording_router() as (first, first_port), recording_router() as (second, second_port):
        clock = ManualClock()
        specs = [
            ProcessSpec(name=f"router-{idx}", role=ProcessRole.ROUTER, host="0.0.0.0", port=7000 + idx)
            for idx in range(2)
        ]
        routers = Routers(RouterConfig(count=2, http_port=8000), specs, membership, CONTROLLER.router, clock=clock)
        running = asyncio.create_task(routers.run())
        both = Pair(routers=routers, clock=clock, fakes=(first, second), ports=(first_port, second_port))
        both.up(0)
        both.up(1)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield both
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def test_until_ready_waits_for_every_router() -> None:
    async with pair() as both:
        both.fakes[1].num_unused = 1
        waiting = asyncio.create_task(both.routers.until_ready(2, among=BOTH))
        await both.fakes[0].until(lambda router: router.num_pushes >= 1)
        await both.fakes[1].until(lambda router: router.num_pushes >= 2)
        assert not waiting.done()
        assert len(both.fakes[0].workers) == 2

        both.fakes[1].num_unused = 0
        await waiting
        assert both.routers.num_ready == 2


async def two_more_pushes(fake: RecordingRouter) -> None:
    """Wait until the router has received and answered a push that began after this call."""
    seen = fake.num_pushes
    await fake.until(lambda router: router.num_pushes >= seen + 2)


async def test_until_empty_waits_until_no_router_has_users_on_the_worker() -> None:
    async with pair() as both:
        for fake, num_users in zip(both.fakes, (1, 3), strict=True):
            fake.num_users = {"decode-1": num_users}
        both.routers.worker_changed()
        for fake in both.fakes:
            await two_more_pushes(fake)
        assert both.routers.num_users("decode-1") == 4

        waiting = asyncio.create_task(both.routers.until_empty("decode-1", among=BOTH))
        both.fakes[0].num_users = {"decode-1": 0}
        await two_more_pushes(both.fakes[0])
        assert not waiting.done()

        both.fakes[1].num_users = {"decode-1": 0}
        await waiting


async def test_every_router_is_told_what_the_planner_says_now() -> None:
    async with pair() as both:
        await both.fakes[0].until(lambda router: router.num_pushes >= 1)
        assert not both.fakes[0].planner_mode
        both.routers.plan = lambda: GetPlanResponse(mode="advise")
        both.routers.worker_changed()
        for fake in both.fakes:
            await fake.until(lambda router: router.planner_mode == "advise")


async def test_until_idle_sends_one_router_away_until_another_is_in_its_place() -> None:
    async with pair() as both:
        first, second = both.fakes
        first.num_requests = second.num_requests = 2
        waiting = asyncio.create_task(both.routers.until_idle("router-0"))
        await first.until(lambda router: router.is_leaving)
        await two_more_pushes(first)
        assert not waiting.done() and not second.is_leaving

        first.num_requests = 0
        await waiting
        both.up(0)
        await first.until(lambda router: not router.is_leaving)


async def test_router_that_is_down_delays_nothing_and_learns_everything_later() -> None:
    async with pair() as both:
        await both.routers.until_ready(2, among=BOTH)
        both.fakes[1].num_unused = 2
        both.down(1)
        await both.routers.until_ready(2, among=BOTH)

        both.fakes[1].workers.clear()
        both.up(1)
        await both.fakes[1].until(lambda router: len(router.workers) == 2)
        waiting = asyncio.create_task(both.routers.until_ready(2, among=BOTH))
        await two_more_pushes(both.fakes[1])
        assert not waiting.done()
        both.fakes[1].num_unused = 0
        await waiting


async def test_silent_router_is_not_waited_for() -> None:
    async with pair() as both:
        await both.routers.until_ready(2, among=BOTH)
        both.routers.router_changed("router-1", "127.0.0.1:1", "127.0.0.1:1")
        waiting = asyncio.create_task(both.routers.until_ready(2, among=BOTH))
        await asyncio.sleep(0)
        assert not waiting.done()

        both.clock.advance(_SILENT_S)
        both.routers.worker_changed()
        await waiting


async def test_until_ready_without_any_router_waits() -> None:
    async with pair() as both:
        await both.routers.until_ready(2, among=BOTH)
        both.down(0)
        both.down(1)
        waiting = asyncio.create_task(both.routers.until_ready(0, among=BOTH))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert both.routers.num_ready == 0
        both.up(0)
        await waiting


async def test_addresses_are_dialled_ones_and_count_up() -> None:
    async with pair() as both:
        first, second = both.ports
        assert both.routers.addresses == (f"127.0.0.1:{first}", f"127.0.0.1:{second}")
        assert both.routers.http_addresses == ("127.0.0.1:8000", "127.0.0.1:8001")


def test_free_ports_are_in_a_row_and_none_that_is_taken() -> None:
    first = free_ports("127.0.0.1", 3)
    again = free_ports("127.0.0.1", 3, taken=range(first, first + 3))

    assert all(is_port_free("127.0.0.1", port) for port in range(first, first + 3))
    assert not set(range(first, first + 3)) & set(range(again, again + 3))


@pytest.mark.skipif(not _EPHEMERAL.exists(), reason="only Linux tells its range of ephemeral ports")
def test_free_port_is_none_that_an_outgoing_connection_may_take() -> None:
    lowest = int(_EPHEMERAL.read_text().split()[0])

    assert free_ports("127.0.0.1", 3) + 2 < lowest
