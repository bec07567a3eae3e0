"""Tells how long an event loop is held, also that of a router: `python -m tests.router.heartbeat FILE --config …`.

A callback runs every 2 ms. Between two of them the loop was held for the time in which its thread did not wait for a
core, and at most for the CPU time that the process has used meanwhile. So calls of other threads that keep the
interpreter lock count, and other load on the machine does not.
"""

import asyncio
import mmap
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from router import server

BEAT_S = 0.002
_LATE_S = 0.02
"""Time without a beat after which the threads' stacks are written down."""
_AT_REST = ("_worker", "_poll_wrapper", "_read", "wait")
"""Functions in which a thread of the router waits."""
_FACTS = struct.Struct("=qd")


class HeldLoop:
    """The longest time for which a loop was held, in a file that another process may map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FACTS.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _FACTS.size)
        self._stacks = path.with_suffix(".stacks")

    @property
    def num_beats(self) -> int:
        """Beats so far."""
        return int(_FACTS.unpack(self._shared)[0])

    @property
    def longest_s(self) -> float:
        """Longest time that the loop was held since `forget`."""
        return float(_FACTS.unpack(self._shared)[1])

    @property
    def stacks(self) -> str:
        """What the threads did while a beat was late, since `forget`."""
        return self._stacks.read_text(encoding="utf-8") if self._stacks.exists() else ""

    def forget(self) -> None:
        """Begin anew."""
        self._stacks.unlink(missing_ok=True)
        self._tell(self.num_beats, 0.0)

    def beat(self, held_s: float) -> None:
        """Count a beat."""
        self._tell(self.num_beats + 1, max(self.longest_s, held_s))

    def note_stacks(self, late_s: float) -> None:
        """Write down what all threads do."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        with self._stacks.open("a", encoding="utf-8") as file:
            for number, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way
                if number != threading.get_ident() and frame.f_code.co_name not in _AT_REST:
                    lines = "".join(traceback.format_stack(frame)[-6:])
                    file.write(f"{late_s * 1e3:.0f} ms late, {names.get(number)}:\n{lines}\n")

    def _tell(self, num_beats: int, longest_s: float) -> None:
        _FACTS.pack_into(self._shared, 0, num_beats, longest_s)


class Heart:
    """Beats in the running event loop until it is stopped."""

    def __init__(self, held: HeldLoop) -> None:
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._before = self._now()
        self._is_over = False
        self._loop.call_later(BEAT_S, self._beat)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def stop(self) -> None:
        """End with the next beat."""
        self._is_over = True

    def _now(self) -> tuple[float, float, float]:
        """Return the time, how long this thread has waited for a core, and the CPU time of the process."""
        waited_ns = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]
        return time.perf_counter(), int(waited_ns) / 1e9, time.process_time()

    def _beat(self) -> None:
        if self._is_over:
            return
        before, self._before = self._before, self._now()
        wall_s, waited_s, cpu_s = (now - then for now, then in zip(self._before, before, strict=True))
        self._held.beat(min(wall_s - waited_s, cpu_s) - BEAT_S)
        self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._is_over:
            time.sleep(_LATE_S / 4)
            if (late_s := time.perf_counter() - self._before[0]) > _LATE_S:
                self._held.note_stacks(late_s)


def main() -> None:
    """Run a router with a heart."""
    held = HeldLoop(Path(sys.argv.pop(1)))
    start_router = server.start_router

    async def start(*args: Any, **options: Any) -> Any:
        running = await start_router(*args, **options)
        Heart(held)
        return running

    server.start_router = start
    from router.__main__ import main as run_router  # which takes the name from there

    run_router()


if __name__ == "__main__":
    main()
