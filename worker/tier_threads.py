"""Threads for I/O that may never end: a process ends without them, which it does not with a `ThreadPoolExecutor`."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class _Work(NamedTuple):
    """One call that a thread is to make."""

    future: "Future[Any]"
    call: Callable[[], Any]

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - the caller's, as with every executor
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class TierThreads(Executor):
    """Up to so many daemon threads, which begin with the first calls and last until `shutdown`. Any thread."""

    def __init__(self, num_threads: int, *, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        """`initializer` is called in each thread when it begins."""
        self._num_threads = num_threads
        self._name = name
        self._initializer = initializer
        self._num_begun = 0
        self._is_over = False
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        """Calls, and None for each thread that is to end."""

    def submit(self, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs) -> "Future[_Result]":
        """Have a thread call `fn`. Raises RuntimeError after `shutdown`."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError(f"cannot call anything in {self._name}: its threads are told to end")
            self._queue.put(_Work(future, partial(fn, *args, **kwargs)))
            if self._num_begun < self._num_threads:
                name = f"{self._name}_{self._num_begun}"
                self._num_begun += 1
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:  # noqa: FBT001, FBT002 - as its base
        """Cancel the calls that no thread has begun, and let the threads end after theirs. Waits for nothing."""
        assert not wait, "these threads may wait for a disk"
        assert cancel_futures, "none of these calls has to be made"
        with self._lock:
            self._is_over = True
        try:
            while (work := self._queue.get_nowait()) is not None:
                work.future.cancel()
        except Empty:
            pass
        for _ in range(self._num_begun):
            self._queue.put(None)

    def _run(self) -> None:
        self._initializer()
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # nothing keeps its result until the next one
