"""The event loop of processes that make or serve many calls at once.

gRPC's poller thread queues the operations that have completed and writes a byte to a socket for each of them. gRPC's
reader takes one byte in a turn of the loop and handles the whole queue, so bytes pile up as soon as a turn sees more
than one operation. Each byte costs a further turn, which finds nothing; and when the socket is full, after some 280
bytes, the thread stands in `write` until half of them are read. No call of the process gets on for those hundred turns,
which take seconds under load. Here every byte that has come is taken in the same turn.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    _Loop = asyncio.SelectorEventLoop
else:
    try:
        from uvloop import Loop as _Loop
    except ImportError:
        _Loop = asyncio.SelectorEventLoop

_MAX_WAKE_UPS = 4096
"""More bytes than a socket pair holds when each is written on its own."""
_T = TypeVar("_T")


class DrainingLoop(_Loop):
    """An event loop, uvloop's where it is installed, that takes all of gRPC's wake-ups at once."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Register a reader like every loop; gRPC's is called once for all bytes that wait."""
        if _is_of_grpc(callback) and isinstance(fd, socket.socket):
            super().add_reader(fd, _call_once, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in a `DrainingLoop`, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=DrainingLoop) as runner:
        return runner.run(main)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    owner = getattr(getattr(callback, "func", callback), "__self__", None)
    return type(owner).__module__.startswith("grpc.")


def _call_once(wake_ups: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Take the bytes that wait, but the one that `callback` takes itself. Each was written after its operation."""
    num_more = len(wake_ups.recv(_MAX_WAKE_UPS, socket.MSG_PEEK)) - 1
    if num_more > 0:
        wake_ups.recv(num_more)
    callback(*args)
