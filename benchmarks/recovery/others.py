"""Hurts processes other than workers in mid-stream: a router, a Ray cluster's controller, the head of Ray."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from benchmarks.faults import Fault, send
from benchmarks.recovery.targets import TIMEOUT_S, Target
from cluster.processes.state import ClusterPhase, ClusterState, StateFile
from common.errors import KvrelayError
from kvrelay.client import AsyncClient

_PAUSE_S = 3.0
"""How long a controller is stopped; nothing but its continuation brings it back."""
_LOOK_S = 0.02


async def all_begun(begun: Sequence[asyncio.Event]) -> None:
    """Wait until every stream has its first tokens, or has failed."""
    await asyncio.gather(*(event.wait() for event in begun))


async def seconds_until(condition: Callable[[], Awaitable[bool]], *, since_s: float) -> float:
    """Wait for a condition; returns the time since then. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - processes are asked
            await asyncio.sleep(_LOOK_S)
    return time.perf_counter() - since_s


async def serves_again(client: AsyncClient, name: str, pid: int) -> bool:
    """Return whether another process than `pid` serves as the worker `name`."""
    return any(
        view.worker_id == name and view.state == "ready" and view.status and view.status.pid != pid
        for view in (await client.status()).workers
    )


class OtherHurt:
    """One fault for processes of a cluster that are no workers, by its state.json."""

    def __init__(self, target: Target, client: AsyncClient) -> None:
        """`client` reaches a router that is not hurt."""
        self._target = target
        self._file = StateFile(target.run_dir)
        self._client = client

    async def prepare(self) -> None:
        """Do nothing: there is nothing to wait for."""

    async def inflict(self, begun: Sequence[asyncio.Event]) -> dict[str, float]:
        """Hurt the victim once all streams have begun; returns how long what followed took, by name."""
        await all_begun(begun)
        match self._target.plan.victim, self._target.plan.fault:
            case "router", fault:
                return await self._hurt_router(fault)
            case "controller", Fault.STOP:
                return await self._stop_controller()
            case "controller", _:
                before = self._state().supervisor
                send(before.pid, signal.SIGKILL)
                return {"back_after_s": await self._in_charge_again(before, time.perf_counter())}
            case _:
                return await self._lose_head()

    async def _hurt_router(self, fault: Fault) -> dict[str, float]:
        router = next(process for process in self._state().processes if process.name == "router-0").identity
        assert router is not None, "the first router runs on this host"
        send(router.pid, signal.SIGSTOP if fault is Fault.STOP else signal.SIGKILL)
        return {"back_after_s": await seconds_until(self._answers, since_s=time.perf_counter())}

    async def _stop_controller(self) -> dict[str, float]:
        """Stop the controller and kill a decode worker meanwhile; it is in charge when that is replaced."""
        victim = next(view for view in (await self._client.status()).workers if view.role == "decode" and view.status)
        assert victim.status is not None
        name, worker_pid, pid = victim.worker_id, victim.status.pid, self._state().supervisor.pid
        send(pid, signal.SIGSTOP)
        try:
            send(worker_pid, signal.SIGKILL)
            await asyncio.sleep(_PAUSE_S)
        finally:
            send(pid, signal.SIGCONT)
        since_s = time.perf_counter()
        return {
            "back_after_s": await seconds_until(lambda: serves_again(self._client, name, worker_pid), since_s=since_s)
        }

    async def _lose_head(self) -> dict[str, float]:
        """Kill Ray's head; it is back when its controller is in charge and its router answers."""
        assert self._target.head is not None, "the cluster has joined a Ray"
        before, hurt_s = self._state().supervisor, time.perf_counter()
        await asyncio.to_thread(self._target.head.kill)
        back_s = await self._in_charge_again(before, hurt_s)
        return {
            "back_after_s": back_s,
            "its_router_back_after_s": await seconds_until(self._answers, since_s=hurt_s),
        }

    def _state(self) -> ClusterState:
        state = self._file.read()
        assert state is not None, "a cluster that runs has a state"
        return state

    async def _in_charge_again(self, before: object, hurt_s: float) -> float:
        """Wait until another controller than `before` says that it looks after everything."""

        async def is_ready() -> bool:
            state = self._file.read()
            return state is not None and state.supervisor != before and state.phase is ClusterPhase.READY

        return await seconds_until(is_ready, since_s=hurt_s)

    async def _answers(self) -> bool:
        """Return whether the first router answers; asks by a new client, whose channel has nothing to wait for."""
        with suppress(KvrelayError):
            async with self._target.client(self._target.addresses[0], max_attempts=1) as client:
                await client.generate("Are you back?", max_tokens=1)
            return True
        return False
