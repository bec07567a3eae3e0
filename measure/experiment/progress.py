"""What is told while an experiment runs."""

import time
from collections.abc import Callable

from measure.experiment.points import Point


class Countdown:
    """Tells how many runs are left, and about how long they take."""

    def __init__(self, *, num_cells: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_cells = num_cells
        self._num_done = 0
        self._now = now
        self._start_s = now()

    def step(self) -> str:
        """Note that a run has ended; return where one is."""
        self._num_done += 1
        num_left = self._num_cells - self._num_done
        each_s = (self._now() - self._start_s) / self._num_done
        left = f", about {span(num_left * each_s)} left" if num_left > 0 else ""
        return f"[{self._num_done}/{self._num_cells}{left}]"


def span(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def point_line(point: Point) -> str:
    """Return what came of a run."""
    everybody = point.overall
    text = (
        f"{point.arm.name} at {point.load:g}/s: {point.goodput_per_s:.2f} good requests/s"
        f" ({everybody.good_share:.1%} of {everybody.num_requests})"
    )
    if everybody.ttft is not None:
        text += f", p99 TTFT {everybody.ttft.p99:.2f} s"
    if everybody.itl is not None:
        text += f", p99 ITL {everybody.itl.p99 * 1000:.0f} ms"
    return text + "".join(f"; {warning}" for warning in point.warnings)
