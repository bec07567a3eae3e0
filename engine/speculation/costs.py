"""The time of a step by its rows, as the latest steps have shown it: what one more row costs beside these.

The worker's timing model (`worker/timing_fit.py`) is a straight line through all steps of hours. Here the question is
one of neighbours: a row is nearly free while the step waits for memory, and has its price once arithmetic is the bound.
Steps are kept by classes of rows. Other work on the machine only ever adds time, so that the fastest of the latest
steps of a class stands for it; steps that are long ago do not count, since contexts have grown and requests changed.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.timing import StepShape

CLASS_STEPS = 8
"""Steps remembered of each class."""
MAX_AGE = 512
"""Steps after which one is forgotten."""
MIN_STEPS = 6
"""Steps before which nothing is predicted; the first few are not typical."""
EQUIVALENT_ROWS = 12.0
"""Rows whose arithmetic takes as long as the part of a step that does not depend on rows: a guess. It stands for the
classes that are not known, and no row counts as cheaper, so that a disturbed measurement cannot fill a large batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    num_rows: int
    seconds: float
    number: int

    @property
    def relative_s(self) -> float:
        """Seconds in proportion to what a step of so many rows is guessed to take."""
        return self.seconds / (self.num_rows + EQUIVALENT_ROWS)


class StepCosts:
    """Predicts steps that only decode. Engine thread only; O(1) per step."""

    def __init__(self) -> None:
        self._classes: dict[int, deque[_Step]] = {}
        self._fastest: dict[int, _Step] = {}
        """The fastest of the latest steps of each class."""
        self._num_steps = 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take a step into account."""
        if shape.num_prefill_tokens or seconds <= 0:
            return
        self._num_steps += 1
        step = _Step(num_rows=shape.num_decodes, seconds=seconds, number=self._num_steps)
        name = _class_of(step.num_rows)
        latest = self._classes.setdefault(name, deque(maxlen=CLASS_STEPS))
        while latest and latest[0].number <= self._num_steps - MAX_AGE:
            latest.popleft()
        latest.append(step)
        self._fastest[name] = min(latest, key=lambda each: each.relative_s)

    def predict(self, num_rows: int, num_more: int) -> list[float]:
        """Return the seconds of steps with `num_rows` and 0 to `num_more` more rows; empty before any can be told."""
        known = self._known()
        if self._num_steps < MIN_STEPS or not known:
            return []
        rows = np.arange(num_rows, num_rows + num_more + 1)
        times_s = _seconds_of(known, rows)
        least_s = times_s[0] * (1 + (rows - num_rows) / (num_rows + EQUIVALENT_ROWS))
        found: list[float] = np.maximum(times_s, least_s).tolist()
        return found

    def _known(self) -> list[tuple[int, float]]:
        """Return rows and seconds of the fastest step of each class. None is slower than one with more rows."""
        oldest = self._num_steps - MAX_AGE
        known: list[tuple[int, float]] = []
        least_s = math.inf
        for name in sorted(self._fastest, reverse=True):
            step = self._fastest[name]
            if step.number > oldest:
                least_s = min(least_s, step.seconds)
                known.append((step.num_rows, least_s))
        return known[::-1]


def _class_of(num_rows: int) -> int:
    """Return the class of steps with so many rows: two classes for each doubling."""
    length = num_rows.bit_length()
    return 2 * length + (num_rows >> (length - 2) & 1 if length > 1 else 0)


def _seconds_of(known: list[tuple[int, float]], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the seconds of steps on the line through the known ones around them, else in proportion to the nearest."""
    (first_rows, first_s), (last_rows, last_s) = known[0], known[-1]
    between = np.interp(rows, [at for at, _s in known], [seconds for _at, seconds in known])
    below = first_s * (rows + EQUIVALENT_ROWS) / (first_rows + EQUIVALENT_ROWS)
    above = last_s * (rows + EQUIVALENT_ROWS) / (last_rows + EQUIVALENT_ROWS)
    return np.where(rows < first_rows, below, np.where(rows > last_rows, above, between))
