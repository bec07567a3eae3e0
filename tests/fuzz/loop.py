"""A virtual loop that knows what of its thread's time is not the event loop's: executors and engines have threads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from measure.simulate.loop import VirtualLoop


class MeteredLoop(VirtualLoop):
    """Collects what goes wrong in callbacks, and the CPU time that other threads would have spent."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere_s = 0.0
        """CPU time of work that belongs to another thread."""
        self.faults: list[BaseException] = []
        """Exceptions raised by callbacks and forgotten tasks."""
        self.set_exception_handler(self._note)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count the block as another thread's."""
        started_s, before_s = time.thread_time(), self.elsewhere_s
        try:
            yield
        finally:
            self.elsewhere_s = before_s + time.thread_time() - started_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run `func` now, on another thread's account."""
        with self.elsewhere():
            return super().run_in_executor(executor, func, *args)

    def take_faults(self) -> list[BaseException]:
        """Return what has gone wrong since the last time."""
        faults, self.faults = self.faults, []
        return faults

    def _note(self, _loop: object, context: dict[str, Any]) -> None:
        self.faults.append(context.get("exception") or RuntimeError(context["message"]))
