"""Hurts workers in the middle of their requests and measures how long it takes until each is replaced."""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence

from benchmarks.answers import closed_loop
from benchmarks.faults import Fault, listening_ports, send, throttled
from benchmarks.recovery.others import all_begun, seconds_until, serves_again
from benchmarks.recovery.targets import Target
from engine.fake import FaultToken
from kvrelay.client import AsyncClient, PlanChosen, WorkerView

_POISON_LENGTHS = {"decode": 20, "prefill": 400}
"""Tokens of a poison prompt by the pool that computes it: short ones are computed where they are decoded."""
_POISON_S = 0.4
_NUM_WARM_PROMPTS = 80
"""Prompts that each worker of the pool computes before a hang: even eight in a step, it has then measured its steps."""
_SLOWER = 20.0
_NUM_READING = 4
"""Prompts that a pool reads at a time, one after the other, while a prefill worker is slow: it has to take steps."""

Views = Sequence[WorkerView]


class WorkerHurt:
    """One fault for workers of a pool, one after the other."""

    def __init__(self, target: Target, client: AsyncClient) -> None:
        """`client` reaches the router that is asked for the state."""
        self._target = target
        self._client = client
        self._pool = target.plan.victim
        self._num_warm = 0
        self._measured: set[int] = set()

    async def prepare(self) -> None:
        """Wait until the pool is whole; before a hang, have every worker measure its steps."""
        await self._until(lambda views: all(view.state == "ready" and view.status for view in views))
        if self._target.plan.fault is Fault.HANG:
            await self._measure_steps()

    async def _measure_steps(self) -> None:
        """Have every worker that has not done so yet compute enough prompts, at first hardly two at a time.

        Later more at a time: two leave out a third worker that is predicted to be a little slower.
        """
        before = await self._num_computed()
        wanted = _NUM_WARM_PROMPTS * _POISON_LENGTHS[self._pool]
        for number in itertools.count():
            computed = await self._num_computed()
            if all(computed[pid] - before[pid] >= wanted for pid in computed if pid not in self._measured):
                break
            await closed_loop(self._warm, range(8), concurrency=min(2 + number // 8, 8))
        self._measured |= before.keys()

    async def _num_computed(self) -> dict[int, int]:
        """Return the computed tokens of each worker by its process."""
        return {view.status.pid: view.status.num_computed_tokens for view in await self._views() if view.status}

    async def inflict(self, begun: Sequence[asyncio.Event]) -> dict[str, float]:
        """Hurt a worker that is computing; returns how long what followed took, by name."""
        if self._pool == "decode":
            await all_begun(begun)
        if self._target.plan.fault is Fault.HANG:
            return await self._hang()
        victim = await self._busy()
        assert victim.status is not None
        name, pid = victim.worker_id, victim.status.pid
        match self._target.plan.fault:
            case Fault.SLOW:
                return await self._slow(name, pid)
            case Fault.CUT:
                assert self._target.network is not None, "a cut needs a network"
                with self._target.network.cut(listening_ports(pid)):
                    return await self._replaced(name, pid, time.perf_counter())
            case fault:
                hurt_s = time.perf_counter()
                send(pid, signal.SIGSTOP if fault is Fault.STOP else signal.SIGKILL)
                return await self._replaced(name, pid, hurt_s)

    async def _hang(self) -> dict[str, float]:
        before = {view.worker_id: view.status.pid for view in await self._views() if view.status}
        prompt = [40] * _POISON_LENGTHS[self._pool] + [FaultToken.HANG.value]
        async with self._client.stream(prompt, max_tokens=1) as events:
            async for event in events:
                if isinstance(event, PlanChosen):
                    hurt_s, plan = time.perf_counter(), event
                    await asyncio.sleep(_POISON_S)  # leaves before it is planned again and hangs the next worker
                    break
        name = plan.decode_worker_id if self._pool == "decode" else plan.prefill_worker_id
        assert name is not None, "the pool computes the prompt"
        return await self._replaced(name, before[name], hurt_s)

    async def _slow(self, name: str, pid: int) -> dict[str, float]:
        reading = asyncio.create_task(self._read_on()) if self._pool == "prefill" else None
        try:
            with throttled(pid, times=_SLOWER):
                hurt_s = time.perf_counter()
                await self._until(lambda views: any(view.slowness for view in views))
                noticed_s = time.perf_counter() - hurt_s
                await self._until(
                    lambda views: any(view.worker_id == name and view.state == "draining" for view in views)
                )
                kept_out_s = time.perf_counter() - hurt_s
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
        send(pid, signal.SIGKILL)
        await self._replaced(name, pid, time.perf_counter())
        return {"noticed_after_s": noticed_s, "kept_out_after_s": kept_out_s}

    async def _read_on(self) -> None:
        """Have the pool read prompts until cancelled."""
        await closed_loop(self._warm, itertools.count(), concurrency=_NUM_READING)

    async def _replaced(self, name: str, pid: int, hurt_s: float) -> dict[str, float]:
        """Wait until another process than `pid` serves as the worker `name`."""
        return {"back_after_s": await seconds_until(lambda: serves_again(self._client, name, pid), since_s=hurt_s)}

    async def _busy(self) -> WorkerView:
        """Return the worker of the pool that runs most requests, as soon as one runs any."""

        def num_running(view: WorkerView) -> int:
            return view.status.load.num_running if view.status and view.state == "ready" else 0

        views = await self._until(lambda views: any(map(num_running, views)))
        return max(views, key=num_running)

    async def _views(self) -> list[WorkerView]:
        return [view for view in (await self._client.status()).workers if view.role == self._pool]

    async def _until(self, condition: Callable[[Views], bool]) -> Views:
        """Wait until the pool is as it should be; returns its workers."""
        views: Views = ()

        async def is_met() -> bool:
            nonlocal views
            views = await self._views()
            return bool(views) and condition(views)

        await seconds_until(is_met, since_s=0.0)
        return views

    async def _warm(self, _number: int) -> None:
        """Have the pool compute a prompt that no worker has computed before: a cached one takes no step."""
        self._num_warm += 1
        number = [32 + self._num_warm // 90**digit % 90 for digit in range(4)]
        rest = [32 + position * position % 90 for position in range(_POISON_LENGTHS[self._pool] - len(number))]
        await self._client.generate(number + rest, max_tokens=1)
