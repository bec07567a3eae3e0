"""A router with an HTTP door, and its workers, on an event loop in a thread of their own."""

import asyncio
import io
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.in_process import System, running_system

START_S = 60.0
_ROUTER = {"http_port": 0, "default_max_tokens": 8, "max_message_mib": 1, "queue_timeout_s": 5.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A running door."""

    port: int
    _system: System
    _loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the door's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @contextmanager
    def watched(self, timeout_s: float) -> Iterator[list[str]]:
        """Yield a list that gets the stacks of the door's tasks once the block has taken that long."""
        stacks: list[str] = []

        def look() -> None:
            for task in asyncio.all_tasks(self._loop):
                text = io.StringIO()
                task.print_stack(file=text)
                stacks.append(text.getvalue())

        timer = threading.Timer(timeout_s, self._loop.call_soon_threadsafe, [look])
        timer.start()
        try:
            yield stacks
        finally:
            timer.cancel()

    def until_idle(self) -> None:
        """Wait until nothing is held. Raises TimeoutError."""
        self.run(self._system.until_idle())


@contextmanager
def running_door() -> Iterator[Door]:
    """Run a door; ends its thread afterwards."""
    doors: list[Door] = []
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with running_system(router=_ROUTER) as system:
            doors.append(Door(port=system.router.http_port, _system=system, _loop=loop))
            is_ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()], name="door")
    thread.start()
    try:
        if not is_ready.wait(START_S):
            raise TimeoutError("the door did not start")
        yield doors[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
