"""Hurts workers in the middle of their requests and measures how long it takes until each is replaced."""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from benchmarks.answers import closed_loop
from benchmarks.faults import Fault, PrivateNetwork, listening_ports, send, throttled
from engine.fake import FaultToken
from kvrelay.client import AsyncClient, PlanChosen, WorkerView

WORKERS = ("decode", "prefill")
POISON_LENGTHS = {"decode": 20, "prefill": 400}
"""Tokens of a poison prompt by the pool that computes it: short ones are computed where they are decoded."""
_POISON_S = 0.4
_NUM_WARM_PROMPTS = 80
"""Prompts that each worker of the pool computes before a hang: even eight in a step, it has then measured its steps."""
_SLOWER = 20.0
_NUM_READING = 4
"""Prompts that a pool reads at a time, one after the other, while a prefill worker is slow: it has to take steps."""
_TIMEOUT_S = 180.0


Recovery = asyncio.Task[dict[str, float]]
"""Ends when the fault is over; its result says how long what followed took, in seconds by name."""


class WorkerHurt:
    """One fault for workers of a pool, one after the other."""

    def __init__(
        self, client: AsyncClient, pool: str, fault: Fault, network: PrivateNetwork | None, *, is_brief: bool = False
    ) -> None:
        """`client` reaches the router that is asked for the state; `network` is for cuts.

        `is_brief`: a slow worker is killed once it is kept out of use, instead of followed until it is used again.
        """
        self._client = client
        self._pool = pool
        self._fault = fault
        self._network = network
        self._is_brief = is_brief
        self._num_warm = 0
        self._measured: set[int] = set()

    async def prepare(self) -> None:
        """Wait until the pool is whole; before a hang, have every worker measure its steps."""
        await self._views_when(lambda views: all(view.state == "ready" and view.status for view in views))
        if self._fault is Fault.HANG:
            await self._measure_steps()

    async def _measure_steps(self) -> None:
        """Have every worker that has not done so yet compute enough prompts, at first hardly two at a time.

        Later more at a time: two leave out a third worker that is predicted to be a little slower.
        """
        before = await self._num_computed()
        wanted = _NUM_WARM_PROMPTS * POISON_LENGTHS[self._pool]
        for number in itertools.count():
            computed = await self._num_computed()
            if all(computed[pid] - before[pid] >= wanted for pid in computed if pid not in self._measured):
                break
            await closed_loop(self._warm, range(8), concurrency=min(2 + number // 8, 8))
        self._measured |= before.keys()

    async def _num_computed(self) -> dict[int, int]:
        """Return the computed tokens of each worker by its process."""
        return {view.status.pid: view.status.num_computed_tokens for view in await self._views() if view.status}

    async def inflict(self, begun: Sequence[asyncio.Event]) -> Recovery:
        """Hurt a worker that is computing; returns at once, with what follows as a task."""
        if self._pool == "decode":
            await asyncio.gather(*(event.wait() for event in begun))
        if self._fault is Fault.HANG:
            return await self._hang()
        victim = await self._busy()
        assert victim.status is not None
        pid, name = victim.status.pid, victim.worker_id
        if self._fault is Fault.SLOW:
            return asyncio.create_task(self._slow(name, pid))
        hurt_s, cut = time.perf_counter(), nullcontext[None]()
        match self._fault:
            case Fault.KILL:
                send(pid, signal.SIGKILL)
            case Fault.STOP:
                send(pid, signal.SIGSTOP)
            case Fault.CUT:
                assert self._network is not None, "a cut needs a network"
                return asyncio.create_task(self._until_replaced(name, pid, self._network.cut(listening_ports(pid))))
        return asyncio.create_task(self._until_replaced(name, pid, cut, hurt_s=hurt_s))

    async def _hang(self) -> Recovery:
        before = {view.worker_id: view.status.pid for view in await self._views() if view.status}
        prompt = [40] * POISON_LENGTHS[self._pool] + [FaultToken.HANG.value]
        async with self._client.stream(prompt, max_tokens=1) as events:
            async for event in events:
                if isinstance(event, PlanChosen):
                    hurt_s, plan = time.perf_counter(), event
                    await asyncio.sleep(_POISON_S)  # leaves before it is planned again and hangs the next worker
                    break
        name = plan.decode_worker_id if self._pool == "decode" else plan.prefill_worker_id
        assert name is not None, "the pool computes the prompt"
        return asyncio.create_task(self._until_replaced(name, before[name], nullcontext(), hurt_s=hurt_s))

    async def _slow(self, name: str, pid: int) -> dict[str, float]:
        reading = asyncio.create_task(self._read_on()) if self._pool == "prefill" else None
        try:
            with throttled(pid, times=_SLOWER):
                hurt_s = time.perf_counter()
                await self._views_when(lambda views: any(view.slowness for view in views))
                noticed_s = time.perf_counter() - hurt_s
                await self._views_when(lambda views: _state_of(name, views) == "draining")
                kept_out_s = time.perf_counter() - hurt_s
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
        times = {"noticed_after_s": noticed_s, "kept_out_after_s": kept_out_s}
        if self._is_brief:
            send(pid, signal.SIGKILL)
            await self._until_replaced(name, pid, nullcontext())
            return times
        hurt_s = time.perf_counter()
        await self._views_when(lambda views: _state_of(name, views) == "ready")
        return times | {"used_again_after_s": time.perf_counter() - hurt_s}

    async def _read_on(self) -> None:
        """Have the pool read prompts until cancelled."""
        await closed_loop(self._warm, itertools.count(), concurrency=_NUM_READING)

    async def _until_replaced(
        self, name: str, pid: int, cut: AbstractContextManager[None], *, hurt_s: float | None = None
    ) -> dict[str, float]:
        """Wait, in the cut, until another process than `pid` serves as the worker `name`."""
        with cut:
            since_s = time.perf_counter() if hurt_s is None else hurt_s

            def is_back(views: Sequence[WorkerView]) -> bool:
                return any(
                    view.worker_id == name and view.state == "ready" and view.status and view.status.pid != pid
                    for view in views
                )

            await self._views_when(is_back)
        return {"back_after_s": time.perf_counter() - since_s}

    async def _busy(self) -> WorkerView:
        """Return the worker of the pool that runs most requests, as soon as one runs any."""

        def num_running(view: WorkerView) -> int:
            return view.status.load.num_running if view.status and view.state == "ready" else 0

        views = await self._views_when(lambda views: any(map(num_running, views)))
        return max(views, key=num_running)

    async def _views(self) -> list[WorkerView]:
        return [view for view in (await self._client.status()).workers if view.role == self._pool]

    async def _views_when(self, condition: Callable[[Sequence[WorkerView]], bool]) -> list[WorkerView]:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                views = await self._views()
                if views and condition(views):
                    return views
                await asyncio.sleep(0.02)

    async def _warm(self, _number: int) -> None:
        """Have the pool compute a prompt that no worker has computed before: a cached one takes no step."""
        self._num_warm += 1
        number = [32 + self._num_warm // 90**digit % 90 for digit in range(4)]
        rest = [32 + position * position % 90 for position in range(POISON_LENGTHS[self._pool] - len(number))]
        await self._client.generate(number + rest, max_tokens=1)


def _state_of(name: str, views: Sequence[WorkerView]) -> str:
    return next((view.state for view in views if view.worker_id == name), "gone")
