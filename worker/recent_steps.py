"""Totals of a worker's steps in the last minutes, and the least time that its device needs for them.

Totals are kept in buckets of some seconds, for an hour: a step costs a few additions, and a window is added up only
when it is read.
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
class StepSums:
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
    host_s: float = 0.0
    """Time between steps while there was work."""
    kv_bytes_received: int = 0
    link_s: float = 0.0
    """Least time of the pulled KV, by the measured bandwidth of the links; 0 before any was measured."""

    def add(self, sample: StepSample, floors: "_Floors") -> None:
        """Count a step and the least times of its parts."""
        shape, memory_s, compute_s = sample.undrafted or sample.shape, floors.memory_s, floors.compute_s
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
            self.decode_weights_s += floors.weights_s

    def merge(self, other: "StepSums") -> None:
        """Add the sums of other steps."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class _Floors:
    """Least times of one step; 0 where the device was not measured."""

    memory_s: float = 0.0
    compute_s: float = 0.0
    weights_s: float = 0.0


_NOT_MEASURED = _Floors()


def _floors_of(sample: StepSample, floors: StepFloors | None) -> _Floors:
    """Return the least times for a step's memory traffic, the weights in it, and its arithmetic.

    Drafted tokens are computed like others, but the keys and values of a sequence need to be read only once for all.
    """
    if floors is None:
        return _NOT_MEASURED
    shape = sample.undrafted or sample.shape
    return _Floors(floors.memory_s(shape), floors.compute_s(sample.shape), floors.weights_s)


_NAMES = tuple(field.name for field in fields(StepSums))


@dataclass(slots=True)
class _Bucket:
    number: int
    totals: StepSums


class RecentSteps:
    """The steps of the last hour. Event loop only, but `over` and the sums since the start: any thread."""

    def __init__(self, floors: StepFloors | None, clock: Clock) -> None:
        self._floors = floors
        self._clock = clock
        self._began_s = clock.monotonic()
        self._buckets: deque[_Bucket] = deque()
        self._reported_s = self._began_s
        self._had_work = False
        self.memory_s = self.compute_s = self.link_s = 0.0
        """Least times of all steps and pulls since the start."""

    def observe(self, samples: Iterable[StepSample], *, has_work: bool = False) -> None:
        """Count steps that have ended; `has_work` says whether another one follows at once."""
        totals, steps_s = self._latest().totals, 0.0
        for sample in samples:
            floors = _floors_of(sample, self._floors)
            totals.add(sample, floors)
            self.memory_s += floors.memory_s
            self.compute_s += floors.compute_s
            steps_s += sample.seconds
        now_s = self._clock.monotonic()
        if self._had_work:
            totals.host_s += max(0.0, now_s - self._reported_s - steps_s)
        self._reported_s, self._had_work = now_s, has_work

    def note_pulled(self, num_bytes: int, *, bytes_per_s: float | None) -> None:
        """Count pulled KV and, where it is known, the bandwidth of the links."""
        totals = self._latest().totals
        totals.kv_bytes_received += num_bytes
        if bytes_per_s:
            totals.link_s += num_bytes / bytes_per_s
            self.link_s += num_bytes / bytes_per_s

    def over(self, window_s: float) -> tuple[float, StepSums]:
        """Return the totals of about the last `window_s`, at most an hour, and the seconds that they cover."""
        now_s = self._clock.monotonic()
        first = max(math.floor((now_s - window_s) / _BUCKET_S) + 1, 0)
        totals = StepSums()
        for bucket in reversed(tuple(self._buckets)):  # another thread may add one
            if bucket.number < first:
                break
            totals.merge(bucket.totals)
        return now_s - max(self._began_s, first * _BUCKET_S), totals

    def _latest(self) -> _Bucket:
        """Return the bucket of this moment; drop those that are too old for any window."""
        number = math.floor(self._clock.monotonic() / _BUCKET_S)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number, StepSums()))
            while self._buckets[0].number < number - WINDOWS_S[-1] / _BUCKET_S:
                self._buckets.popleft()
        return self._buckets[-1]
