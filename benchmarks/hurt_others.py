"""Kills or stops processes other than workers in mid-stream: a router, a Ray cluster's controller, the head of Ray."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.faults import Fault, send
from benchmarks.hurt import Recovery
from cluster.processes.state import ClusterPhase, StateFile
from common.errors import KvrelayError
from common.process import ProcessIdentity
from kvrelay.client import AsyncClient

PAUSE_S = 3.0
"""How long a controller is stopped; nothing but its continuation brings it back."""
BACK_TIMEOUT_S = 120.0
_LOOK_S = 0.05

Ask = Callable[[], AsyncClient]
"""Makes a client of the router whose return is awaited."""


async def hurt_router(begun: Sequence[asyncio.Event], pid: int, fault: Fault, ask: Ask) -> Recovery:
    """Kill or stop a router; it is back when it answers."""
    await _all(begun)
    send(pid, signal.SIGSTOP if fault is Fault.STOP else signal.SIGKILL)
    return asyncio.create_task(_answers(ask, time.perf_counter()))


async def _answers(ask: Ask, hurt_s: float) -> dict[str, float]:
    async with asyncio.timeout(BACK_TIMEOUT_S):
        while True:
            with suppress(KvrelayError):
                async with ask() as client:  # a new one, whose channel has nothing to wait for
                    await client.generate("Are you back?", max_tokens=1)
                return {"back_after_s": time.perf_counter() - hurt_s}
            await asyncio.sleep(_LOOK_S)


async def hurt_stranger(begun: Sequence[asyncio.Event], pid: int, fault: Fault) -> Recovery:
    """Kill or stop a process of a cluster that this benchmark did not start, and wait for nothing."""
    await _all(begun)
    send(pid, signal.SIGSTOP if fault is Fault.STOP else signal.SIGKILL)
    return asyncio.create_task(_nothing())


async def _nothing() -> dict[str, float]:
    return {}


class ControllerHurt:
    """Faults of a cluster's controller and of the head that it runs at, by its state.json."""

    def __init__(self, run_dir: Path, client: AsyncClient) -> None:
        """`client` reaches a router that does not run at the head."""
        self._file = StateFile(run_dir)
        self._client = client

    async def kill(self, begun: Sequence[asyncio.Event]) -> Recovery:
        """Kill the controller; another life is in charge when it says that it looks after everything."""
        await _all(begun)
        before = self._present()
        send(before.pid, signal.SIGKILL)
        return asyncio.create_task(self._is_in_charge_again(before, time.perf_counter()))

    async def stop(self, begun: Sequence[asyncio.Event]) -> Recovery:
        """Stop the controller for `PAUSE_S` and kill a decode worker meanwhile; it is in charge when that is replaced.

        The time counts from the controller's continuation.
        """
        await _all(begun)
        before = self._present()
        victim = next(view for view in (await self._client.status()).workers if view.role == "decode" and view.status)
        assert victim.status is not None
        send(before.pid, signal.SIGSTOP)
        try:
            send(victim.status.pid, signal.SIGKILL)
            await asyncio.sleep(PAUSE_S)
        finally:
            send(before.pid, signal.SIGCONT)
        return asyncio.create_task(self._serves_again(victim.worker_id, victim.status.pid, time.perf_counter()))

    async def lose_head(self, begun: Sequence[asyncio.Event], kill: Callable[[], None], ask: Ask) -> Recovery:
        """Kill Ray's head by `kill`; it is back when its controller is in charge and its router answers."""
        await _all(begun)
        before, hurt_s = self._present(), time.perf_counter()
        await asyncio.to_thread(kill)

        async def recovers() -> dict[str, float]:
            times = await self._is_in_charge_again(before, hurt_s)
            return times | {"its_router_back_after_s": (await _answers(ask, hurt_s))["back_after_s"]}

        return asyncio.create_task(recovers())

    def _present(self) -> ProcessIdentity:
        state = self._file.read()
        assert state is not None, "a cluster that runs has a state"
        return state.supervisor

    async def _is_in_charge_again(self, before: ProcessIdentity, hurt_s: float) -> dict[str, float]:
        async with asyncio.timeout(BACK_TIMEOUT_S):
            while True:
                state = self._file.read()
                if state is not None and state.supervisor != before and state.phase is ClusterPhase.READY:
                    return {"back_after_s": time.perf_counter() - hurt_s}
                await asyncio.sleep(_LOOK_S)

    async def _serves_again(self, name: str, pid: int, since_s: float) -> dict[str, float]:
        async with asyncio.timeout(BACK_TIMEOUT_S):
            while True:
                for view in (await self._client.status()).workers:
                    if view.worker_id == name and view.state == "ready" and view.status and view.status.pid != pid:
                        return {"back_after_s": time.perf_counter() - since_s}
                await asyncio.sleep(_LOOK_S)


async def _all(begun: Sequence[asyncio.Event]) -> None:
    await asyncio.gather(*(event.wait() for event in begun))
