"""The faults of one walk: when they happen, what they hit, and how long they last.

Each kind of worker or network fault that is on has a task of its own, which waits, draws a victim and lets the fault
run its time. One healthy decode worker, which could serve alone, stays in reach of every router: without one, requests
would rightly fail. Workers that a poison request ends are not spared.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from measure.simulate.chaos.clients import Clients
from measure.simulate.chaos.host import Host
from measure.simulate.chaos.members import Members
from measure.simulate.chaos.routers import ChaosRouters
from measure.simulate.chaos.settings import CUT_FAULTS, PROCESS_FAULTS, ChaosSettings, FaultKind
from measure.simulate.faults import Direction
from measure.simulate.network import SimNetwork
from measure.simulate.wire import KEEPALIVE_S

_MIN_FAULT_S = 0.3
_SLOW_FACTOR = 10.0
_KILLED_SHARE = 0.2
"""Share of stopped processes that are killed in the end."""
_MAX_FLAP_S = 2.0


class Storm:
    """All faults between `start` and `stop`. Event loop only."""

    def __init__(
        self,
        draw: random.Random,
        settings: ChaosSettings,
        network: SimNetwork,
        *,
        hosts: Sequence[Host],
        routers: ChaosRouters,
        clients: Clients,
    ) -> None:
        self._loop = network.loop
        self._draw = draw
        self._settings = settings
        self._network = network
        self._hosts = hosts
        self._routers = routers
        self._clients = clients
        self._members = Members(hosts, routers)
        routers.on_back = self._members.notify_routers
        self._drawing: list[asyncio.Task[None]] = []
        self._raging: dict[asyncio.Task[None], None] = {}

    def start(self) -> None:
        """Begin."""
        for fault in sorted(
            self._settings.faults
            & (PROCESS_FAULTS | CUT_FAULTS | {FaultKind.DRAIN, FaultKind.FLIP, FaultKind.FLOOD, FaultKind.ROUTER_CRASH})
        ):
            self._drawing.append(self._loop.create_task(self._repeat(fault)))

    async def stop(self) -> None:
        """End every fault now: what stopped goes on, what was cut is whole. Hung workers are left to their watchdog."""
        for host in self._hosts:
            host.spare()
        self._routers.spare()
        for task in (*self._drawing, *self._raging):
            task.cancel()
        if tasks := [*self._drawing, *self._raging]:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def _repeat(self, fault: FaultKind) -> None:
        make = self._kill_or_cut(fault)
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._settings.mean_gap_s))
            raging = make()
            if raging is None:
                continue
            self._clients.report.faults[fault] += 1
            task = self._loop.create_task(raging)
            self._raging[task] = None
            task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._raging.pop(task, None)
        if not task.cancelled():
            task.result()

    def _kill_or_cut(self, fault: FaultKind) -> Callable[[], Coroutine[Any, Any, None] | None]:
        if fault in CUT_FAULTS:
            return lambda: self._draw_cut(fault)
        if fault is FaultKind.FLOOD:
            return lambda: self._clients.flood(self._draw.choice([*self._routers.alive.values()]))
        if fault is FaultKind.HOST_CRASH:
            return self._draw_pair
        if fault is FaultKind.ROUTER_CRASH:
            return self._draw_router
        return lambda: self._draw_victim(fault)

    def _seconds(self) -> float:
        """Return the length of a fault: short ones are as likely as long ones."""
        return math.exp(self._draw.uniform(math.log(_MIN_FAULT_S), math.log(self._settings.max_fault_s)))

    # Faults of processes.

    def _draw_victim(self, fault: FaultKind) -> Coroutine[Any, Any, None] | None:
        host = self._draw.choice(self._hosts)
        if not host.is_well or not self._is_bearable(victims=(host,)):
            return None
        if fault is FaultKind.FLIP and (self._members.is_leaving(host) or not self._members.may_flip(host)):
            return None
        return self._befall(fault, host)

    def _draw_pair(self) -> Coroutine[Any, Any, None] | None:
        decode = [host for host in self._hosts if host.is_decode]
        prefill = [host for host in self._hosts if not host.is_decode] or decode
        pair = dict.fromkeys((self._draw.choice(prefill), self._draw.choice(decode)))
        if not all(host.is_well for host in pair) or not self._is_bearable(victims=pair):
            return None
        return self._lose(pair)

    async def _lose(self, hosts: Collection[Host]) -> None:
        for host in hosts:
            host.die()

    def _draw_router(self) -> Coroutine[Any, Any, None] | None:
        # A router's successor knows nothing of the workers that a request has lost: poison would end more of them.
        if self._clients.serve_poison or len(self._routers.alive) == 1:
            return None
        return self._lose_router(self._draw.choice([*self._routers.alive]))

    async def _lose_router(self, address: str) -> None:
        self._routers.die(address, down_s=self._draw.uniform(0.0, self._settings.max_down_s))

    async def _befall(self, fault: FaultKind, host: Host) -> None:
        match fault:
            case FaultKind.CRASH:
                host.die()
            case FaultKind.STOP:
                await host.stop_for(self._seconds())
                if self._draw.random() < _KILLED_SHARE:
                    host.die()
            case FaultKind.HUNG_STEP:
                host.hang_step()
            case FaultKind.HUNG_LOOP:
                host.hang_loop()
            case FaultKind.SLOW:
                await host.slow_for(self._seconds(), factor=_SLOW_FACTOR)
            case FaultKind.DRAIN:
                await self._members.drain(host, self._seconds())
            case FaultKind.FLIP:
                await self._members.flip(host)

    # Cuts.

    def _draw_cut(self, fault: FaultKind) -> Coroutine[Any, Any, None] | None:
        one = self._draw.choice(self._hosts)
        others = [*self._routers.alive, *(host.address for host in self._hosts if host is not one)]
        other = self._draw.choice(others)
        if not self._is_bearable(cut=(one.address, other)):
            return None
        directions = [(one.address, other), (other, one.address)]
        if fault is not FaultKind.CUT:
            self._draw.shuffle(directions)
        return self._cut(fault, directions if fault is FaultKind.CUT else directions[:1])

    async def _cut(self, fault: FaultKind, directions: Sequence[Direction]) -> None:
        seconds = self._seconds()
        if fault is not FaultKind.FLAPPING_CUT:
            await self._cut_for(seconds, directions)
            return
        ends_s = self._loop.time() + seconds
        while self._loop.time() < ends_s:
            one, other = directions[0]
            directions = [(one, other) if self._draw.random() < 0.5 else (other, one)]
            await self._cut_for(self._draw.uniform(0.0, _MAX_FLAP_S), directions)
            await asyncio.sleep(self._draw.uniform(0.0, _MAX_FLAP_S))

    async def _cut_for(self, seconds: float, directions: Sequence[Direction]) -> None:
        network, (one, other) = self._network, directions[0]
        for direction in directions:
            network.cuts.cut(direction)
        try:
            while seconds > KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S)
                seconds -= KEEPALIVE_S
                network.break_off(one, other)  # no ping is answered
            await asyncio.sleep(seconds)
        finally:
            for direction in directions:
                network.cuts.heal(direction)

    def _is_bearable(self, *, victims: Collection[Host] = (), cut: Direction | None = None) -> bool:
        """Return whether every router still reaches a healthy decode worker when this fault comes on top."""

        def reaches(router: str, host: Host) -> bool:
            if not host.is_decode or host in victims or not host.is_well or self._members.is_leaving(host):
                return False
            return not (self._network.cuts.parts(router, host.address) or (cut and {router, host.address} == {*cut}))

        return all(any(reaches(router, host) for host in self._hosts) for router in self._routers.alive)
