"""A few threads for work of many tenants: tokenizing, which takes 0.2 s for a million characters.

1. Between tenants, work goes by the virtual counters of the fair queue (line/fair_queue.py), charged by characters
   and divided by weights: the tenant that sends most waits longest, and none waits behind all of another's work.
2. Within a tenant, short work goes before long work that arrived at about the same time, by size with ageing.
3. Work cannot be interrupted, so long work gets all threads but one, and short work never waits for it to end.
4. A thread counts as busy until its work has ended, even when the call was cancelled: calls that are sent and cancelled
   cannot pile up abandoned work. Work that has not begun by then never begins.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from common.metering import charge
from router.line.fair_queue import FairQueue
from router.line.tenant_queue import Place, rank
from router.tenants import Tenant

LONG_CHARS = 1 << 16
"""Work of more characters than this is long: more than 10 ms of one thread."""
CALL_CHARS = 256
"""Cost of a call besides its characters."""
_S_PER_CHAR = 2e-7

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Place):
    """A call that waits for a thread."""

    begins: "asyncio.Future[None]"
    cost: int


class _SizeClass:
    """Waiting calls of one size class, short or long, and the number of threads that it may still take."""

    def __init__(self, num_threads: int) -> None:
        self.num_free = num_threads
        self.queue: FairQueue[_Turn] = FairQueue()


class FairThreads:
    """Threads and the fair queue before them. Event loop only."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        """Prepare at least two threads, which start when they are needed."""
        assert num_threads >= 2, f"{num_threads} threads: one is reserved for short work"
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._long, self._short = _SizeClass(num_threads - 1), _SizeClass(num_threads)
        self._num_calls = 0

    async def run(self, work: Callable[[], _Result], *, tenant: Tenant, num_chars: int) -> _Result:
        """Run `work` on a thread when it is the tenant's turn; return its result or raise its exception.

        The time on the thread is charged to the payer of the running task.
        """
        size_class = self._long if num_chars > LONG_CHARS else self._short
        await self._wait(size_class, tenant, num_chars + CALL_CHARS)
        try:
            running = self._threads.submit(work)
        except RuntimeError:  # the threads were closed in the meantime
            self._end(size_class)
            raise
        running.add_done_callback(partial(self._end_from_thread, asyncio.get_running_loop(), size_class))
        begun_s = time.monotonic()
        try:
            return await asyncio.wrap_future(running)
        finally:
            charge(time.monotonic() - begun_s)
            del running  # else its exception refers to itself by its traceback, and to all that the work has read

    def begin(self, work: Callable[[], None]) -> None:
        """Run work of no tenant's, before the first call."""
        self._threads.submit(work)

    def close(self) -> None:
        """Stop the threads when their current work ends; nothing can be run any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, size_class: _SizeClass, tenant: Tenant, cost: int) -> None:
        """Wait for a thread and take it."""
        self._num_calls += 1
        key = rank(priority=0, size_s=cost * _S_PER_CHAR, due_s=time.monotonic(), number=self._num_calls)
        size_class.queue.add_tenant(tenant.name, weight=tenant.weight)
        turn = _Turn(rank=key, begins=asyncio.get_running_loop().create_future(), cost=cost)
        size_class.queue.push(turn, tenant=tenant.name)
        self._serve()
        try:
            await turn.begins
        except asyncio.CancelledError:
            if turn.begins.cancelled():
                size_class.queue.discard(turn)
            else:
                self._end(size_class)  # its turn had come, and it leaves before it begins
            raise

    def _serve(self) -> None:
        # Long work first: it never takes the last thread, but an endless supply of short work could take all.
        for size_class in (self._long, self._short):
            while self._num_free and size_class.num_free and (turn := size_class.queue.pop(now_s=0.0)) is not None:
                if turn.begins.done():  # cancelled: its task is leaving the queue
                    continue
                size_class.queue.charge(turn.queue.name, turn.cost)
                size_class.num_free -= 1
                self._num_free -= 1
                turn.begins.set_result(None)

    def _end_from_thread(self, loop: asyncio.AbstractEventLoop, size_class: _SizeClass, _done: Future[_Result]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._end, size_class)

    def _end(self, size_class: _SizeClass) -> None:
        size_class.num_free += 1
        self._num_free += 1
        self._serve()
