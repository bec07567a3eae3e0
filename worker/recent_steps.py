"""Totals of a worker's steps in the last minutes, and the least time that its device needs for them.

Totals are kept in buckets of some seconds, for an hour: a step costs a few additions, and a window is added up only
when somebody asks for it.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from common.clock import Clock
from engine.events import StepSample
from engine.work import StepFloors

WINDOWS_S = (60.0, 300.0, 3600.0)
_BUCKET_S = 10.0


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Sums over steps. A prefill step has prompt tokens in it, a decode step none."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    """Sequences of each decode step."""
    num_context_tokens: int = 0
    """KV tokens that decode steps read."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_memory_s: float = 0.0
    """Least time for the memory traffic of the prefill steps; 0 where the device was not measured, as below."""
    prefill_compute_s: float = 0.0
    """Least time for their arithmetic."""
    decode_memory_s: float = 0.0
    decode_compute_s: float = 0.0
    decode_weights_s: float = 0.0
    """Part of `decode_memory_s` that reads weights."""

    def add(self, sample: StepSample, floors: StepFloors | None) -> None:
        """Count a step."""
        shape, memory_s, compute_s = sample.undrafted or sample.shape, 0.0, 0.0
        if floors is not None:
            memory_s, compute_s = _floors_of(sample, floors)
        if shape.num_prefill_tokens:
            self.num_prefill_steps += 1
            self.num_prefill_tokens += shape.num_prefill_tokens
            self.prefill_s += sample.seconds
            self.prefill_memory_s += memory_s
            self.prefill_compute_s += compute_s
        else:
            self.num_decode_steps += 1
            self.num_decodes += shape.num_decodes
            self.num_context_tokens += shape.num_context_tokens
            self.decode_s += sample.seconds
            self.decode_memory_s += memory_s
            self.decode_compute_s += compute_s
            self.decode_weights_s += 0.0 if floors is None else floors.weights_s

    def merge(self, other: "StepTotals") -> None:
        """Add the sums of other steps."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _floors_of(sample: StepSample, floors: StepFloors) -> tuple[float, float]:
    """Return the least times for a step's memory traffic and its arithmetic.

    Drafted tokens are computed like others, but the keys and values of a sequence need to be read only once for all.
    """
    return floors.memory_s(sample.undrafted or sample.shape), floors.compute_s(sample.shape)


_NAMES = tuple(field.name for field in fields(StepTotals))


@dataclass(slots=True)
class _Bucket:
    number: int
    totals: StepTotals


class RecentSteps:
    """The steps of the last hour. Event loop only."""

    def __init__(self, floors: StepFloors | None, clock: Clock) -> None:
        self._floors = floors
        self._clock = clock
        self._began_s = clock.monotonic()
        self._buckets: deque[_Bucket] = deque()
        self.memory_s = self.compute_s = 0.0
        """Least times of all steps since the start."""

    def observe(self, samples: Iterable[StepSample]) -> None:
        """Count steps that have ended."""
        for sample in samples:
            self._latest().totals.add(sample, self._floors)
            if self._floors is not None:
                memory_s, compute_s = _floors_of(sample, self._floors)
                self.memory_s += memory_s
                self.compute_s += compute_s

    def over(self, window_s: float) -> tuple[float, StepTotals]:
        """Return the totals of about the last `window_s`, at most an hour, and the seconds that they cover."""
        now_s = self._clock.monotonic()
        first = max(math.floor((now_s - window_s) / _BUCKET_S) + 1, 0)
        totals = StepTotals()
        for bucket in reversed(self._buckets):
            if bucket.number < first:
                break
            totals.merge(bucket.totals)
        return now_s - max(self._began_s, first * _BUCKET_S), totals

    def _latest(self) -> _Bucket:
        """Return the bucket of this moment; drop those that are too old for any window."""
        number = math.floor(self._clock.monotonic() / _BUCKET_S)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number, StepTotals()))
            while self._buckets[0].number < number - WINDOWS_S[-1] / _BUCKET_S:
                self._buckets.popleft()
        return self._buckets[-1]
