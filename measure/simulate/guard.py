"""What a simulation needs of its process: a bug ends it, wherever it shows, and garbage is collected less often."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ending_on_faults(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Cancel the running task when a callback, such as an engine's step, raises, and raise that from the block.

    asyncio alone would log it and go on.
    """
    faults: list[BaseException] = []
    task = asyncio.current_task()
    assert task is not None, "a simulation runs in a task"

    def take(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        faults.append(context.get("exception") or RuntimeError(context["message"]))
        task.cancel()

    loop.set_exception_handler(take)
    try:
        yield
    except asyncio.CancelledError:
        if not faults:
            raise
    if faults:
        raise faults[0]


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector look less often, and past what exists already: small objects come by the million."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
