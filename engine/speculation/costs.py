"""The time of a step by its rows, as the latest steps have shown it: what one more row costs beside these.

The worker's timing model (`worker/timing_fit.py`) is a straight line through all steps of hours. Here the question is
one of neighbours: a row is nearly free while the step waits for memory, and has its price once arithmetic is the bound.
Steps are kept by classes of rows. Other work on the machine only ever adds time, so that the fastest of the latest
steps of a class stands for it; steps that are long ago do not count, since contexts have grown and requests changed.
"""

from collections import deque
from dataclasses import dataclass, replace

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
        self._num_steps = 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take a step into account."""
        if shape.num_prefill_tokens or seconds <= 0:
            return
        self._num_steps += 1
        step = _Step(num_rows=shape.num_decodes, seconds=seconds, number=self._num_steps)
        self._classes.setdefault(_class_of(step.num_rows), deque(maxlen=CLASS_STEPS)).append(step)

    def predict(self, num_rows: int, num_more: int) -> list[float]:
        """Return the seconds of steps with `num_rows` and 0 to `num_more` more rows; empty before any can be told."""
        known = self._known()
        if self._num_steps < MIN_STEPS or not known:
            return []
        alone_s = _between(known, num_rows)
        return [
            max(_between(known, num_rows + i), alone_s * (1 + i / (num_rows + EQUIVALENT_ROWS)))
            for i in range(num_more + 1)
        ]

    def _known(self) -> list[_Step]:
        """Return the fastest step of each class, by rows. One is never slower than one with more rows."""
        oldest = self._num_steps - MAX_AGE
        known: list[_Step] = []
        for name in sorted(self._classes, reverse=True):
            recent = [step for step in self._classes[name] if step.number > oldest]
            if recent:
                best = min(recent, key=lambda step: step.relative_s)
                known.append(replace(best, seconds=min(best.seconds, known[-1].seconds)) if known else best)
        return known[::-1]


def _class_of(num_rows: int) -> int:
    """Return the class of steps with so many rows: two classes for each doubling."""
    length = num_rows.bit_length()
    return 2 * length + (num_rows >> (length - 2) & 1 if length > 1 else 0)


def _between(known: list[_Step], num_rows: int) -> float:
    """Return the seconds of a step on the line through the known ones around it, else in proportion to the nearest."""
    above = next((i for i, step in enumerate(known) if step.num_rows >= num_rows), len(known))
    if 0 < above < len(known):
        left, right = known[above - 1], known[above]
        share = (num_rows - left.num_rows) / (right.num_rows - left.num_rows)
        return left.seconds + share * (right.seconds - left.seconds)
    nearest = known[min(above, len(known) - 1)]
    return nearest.relative_s * (num_rows + EQUIVALENT_ROWS)
