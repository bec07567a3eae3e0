"""One pool as a diagnosis sees it: what its workers did in a window, and how fast they are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low

from common.ids import WorkerId
from common.timing import TimingModel
from common.walls import WallShares, overhead_s, wall_shares
from kvrelay.v1 import worker_pb2
from router.observe.alarms import CLEAR_SLOW, RAISE_SLOW

StepTotals = worker_pb2.StepTotals
_LEAST_BUSY = 0.01
_MIN_STEPS = 16
"""Decode steps whose mean time is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedWorker:
    """A worker of the pool that answers."""

    worker_id: WorkerId
    status: worker_pb2.WorkerStatus
    timing: TimingModel
    block_size: int
    """Tokens of a page."""
    slowness: float = 0.0
    """Multiple of the step time of the pool's other workers while it counts as slow; else 0."""

    @property
    def has_decode_model(self) -> bool:
        """Whether its model of decode steps is fitted, by itself or its pool, not guessed."""
        return self.timing.decode.is_measured

    def decode_step_s(self, batch: float, context: float) -> float:
        """Return the predicted time of a decode step of `batch` sequences with `context` KV tokens each."""
        model = self.timing.decode
        return model.constant_s + batch * (model.per_decode_s + model.per_context_token_s * context)

    def steps(self, window_s: float) -> StepTotals:
        """Return the totals of the shortest window that covers `window_s`, or of the longest one."""
        known = sorted(self.status.recent_steps, key=lambda totals: totals.window_s)
        return next((totals for totals in known if totals.window_s >= window_s), known[-1] if known else StepTotals())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareCores:
    """Cores that another worker would find idle."""

    num_idle: float
    num_wanted: float
    """Cores that its steps would use, if it were as busy as the others."""

    @property
    def share(self) -> float:
        """Share of a whole worker that the idle cores make."""
        return min(1.0, self.num_idle / self.num_wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedPool:
    """The workers of a role."""

    name: str
    """"prefill" or "decode"."""
    workers: tuple[DiagnosedWorker, ...]
    window_s: float

    def total(self, name: str) -> float:
        """Return a field of `StepTotals`, summed over the workers."""
        return float(sum(getattr(worker.steps(self.window_s), name) for worker in self.workers))

    @property
    def busy_s(self) -> float:
        """Time in steps, summed over the workers."""
        return self.total("prefill_s") + self.total("decode_s")

    @property
    def busy_share(self) -> float:
        """Share of the window in which a worker ran steps, in the mean."""
        covered_s = self.total("covered_s")
        return min(1.0, self.busy_s / covered_s) if covered_s else 0.0

    @property
    def memory_share(self) -> float:
        """Share of the time in steps that their memory traffic needs at least; 0 where it is not known."""
        return self._floor_share("memory_s")

    @property
    def compute_share(self) -> float:
        """Share of the time in steps that their arithmetic needs at least; 0 where it is not known."""
        return self._floor_share("compute_s")

    def _floor_share(self, name: str) -> float:
        floor_s = self.total(f"prefill_{name}") + self.total(f"decode_{name}")
        return floor_s / self.busy_s if self.busy_s else 0.0

    @property
    def overhead_share(self) -> float:
        """Share of the time in steps beyond their bounds: prefill and decode steps each have their own."""
        return overhead_s(self.total) / self.busy_s if self.busy_s else 0.0

    @property
    def spare(self) -> "SpareCores | None":
        """Cores that another worker would find on the host with the most idle ones; None where that is not known."""
        known = [
            SpareCores(
                num_idle=worker.status.num_idle_cores,
                num_wanted=worker.status.device.num_cores * max(_LEAST_BUSY, self.busy_share),
            )
            for worker in self.workers
            if worker.status.HasField("num_idle_cores") and worker.status.device.num_cores
        ]
        return max(known, key=lambda each: each.share, default=None)

    @property
    def spare_share(self) -> float:
        """Share of another worker that the idle cores make; 1 where that is not known."""
        return 1.0 if self.spare is None else self.spare.share

    @property
    def slowest_link(self) -> worker_pb2.LinkRate | None:
        """Its pulls that are farthest from what their transport can move; None where that was not measured."""
        links = [
            link
            for worker in self.workers
            for link in worker.status.link_rates
            if link.bytes_per_s and link.most_bytes_per_s
        ]
        return min(links, key=lambda link: link.bytes_per_s / link.most_bytes_per_s, default=None)

    @property
    def mean_batch(self) -> float:
        """Sequences of a decode step, in the mean; 0 without any such step."""
        num_steps = self.total("num_decode_steps")
        return self.total("num_decodes") / num_steps if num_steps else 0.0

    @property
    def mean_context(self) -> float:
        """KV tokens of a decoding sequence, in the mean."""
        num_decodes = self.total("num_decodes")
        return self.total("num_context_tokens") / num_decodes if num_decodes else 0.0

    @property
    def page_share(self) -> float:
        """Share of the pages that are in use or hold reusable KV."""
        num_blocks = sum(worker.status.load.num_blocks for worker in self.workers)
        held = sum(worker.status.num_used_blocks + worker.status.num_cached_blocks for worker in self.workers)
        return held / num_blocks if num_blocks else 0.0

    @property
    def used_page_share(self) -> float:
        """Share of the pages that are in use."""
        num_blocks = sum(worker.status.load.num_blocks for worker in self.workers)
        return sum(worker.status.num_used_blocks for worker in self.workers) / num_blocks if num_blocks else 0.0

    @property
    def promised_window_share(self) -> float:
        """Share of the window pages, or state pages, that are promised; 0 where there are none."""
        loads = [worker.status.load for worker in self.workers]
        num_pages = sum(load.num_window_pages for load in loads)
        return sum(load.num_promised_window_pages for load in loads) / num_pages if num_pages else 0.0

    @property
    def num_places(self) -> float:
        """Sequences that may be in its batches; infinite where a worker tells no limit."""
        return sum(
            load.num_running + load.num_waiting + load.num_reserved + load.num_free_slots
            if load.HasField("num_free_slots")
            else math.inf
            for load in (worker.status.load for worker in self.workers)
        )

    @property
    def num_held_by_pages(self) -> float:
        """Sequences of the mean context that its pages hold; infinite where none has decoded."""
        num_tokens = sum(worker.status.load.num_blocks * worker.block_size for worker in self.workers)
        return num_tokens / self.mean_context if self.mean_context else math.inf

    @property
    def prefill_token_s(self) -> float:
        """Measured time of a prompt token in prefill steps, in the mean; 0 without any such step."""
        num_tokens = self.total("num_prefill_tokens")
        return self.total("prefill_s") / num_tokens if num_tokens else 0.0

    @property
    def mean_decode_step_s(self) -> float:
        """Measured time of a decode step, in the mean; 0 without any such step."""
        num_steps = self.total("num_decode_steps")
        return self.total("decode_s") / num_steps if num_steps else 0.0

    def decode_step_s(self, batch: float, context: float) -> tuple[float, float, float] | None:
        """Return median, least and largest prediction, over the workers, of a decode step.

        It decodes `batch` sequences with `context` KV tokens each. None while no worker has a fitted model.
        """
        predicted = [worker.decode_step_s(batch, context) for worker in self.workers if worker.has_decode_model]
        return (median(predicted), min(predicted), max(predicted)) if predicted else None

    def decode_memory_s(self, batch_share: float) -> float:
        """Return the least time of a decode step whose batch is a share of the mean one; 0 where it is not known."""
        num_steps, weights_s = self.total("num_decode_steps"), self.total("decode_weights_s")
        return (weights_s + batch_share * (self.total("decode_memory_s") - weights_s)) / num_steps if num_steps else 0.0

    def over(self, window_s: float) -> "DiagnosedPool":
        """Return the pool in another window."""
        return replace(self, window_s=window_s)

    @property
    def covered_s(self) -> float:
        """Seconds that a worker has lived in the window, in the mean."""
        return self.total("covered_s") / len(self.workers) if self.workers else 0.0

    @property
    def walls(self) -> WallShares:
        """The use of the workers' time in the window."""
        return wall_shares(self.total, self.total("covered_s"))

    @property
    def slow_workers(self) -> Mapping[WorkerId, float]:
        """Workers that count as slow, and how many times slower their steps are.

        Besides those that the router has noticed by their timing models, these are the ones whose measured decode steps
        take `RAISE_SLOW` times as long as the other workers' models predict for the same batches.
        """
        found = {worker.worker_id: worker.slowness or self._measured_slowness(worker) for worker in self.workers}
        return {worker_id: times for worker_id, times in found.items() if times >= CLEAR_SLOW}

    def _measured_slowness(self, worker: DiagnosedWorker) -> float:
        """Return the multiple; 0 for a worker that is not slow, or one with too few steps to judge.

        The others' models count only where they have run batches of at least half the size: what a model says of much
        larger ones than it has seen is half a guess.
        """
        steps = worker.steps(self.window_s)
        if steps.num_decode_steps < _MIN_STEPS:
            return 0.0
        others_s = [
            _would_take_s(each, steps, own)
            for each in self.workers
            if each is not worker and each.has_decode_model
            if (own := each.steps(self.window_s)).num_decode_steps >= _MIN_STEPS
            if 2 * _mean_shape(own)[0] >= _mean_shape(steps)[0]
        ]
        times = steps.decode_s / steps.num_decode_steps / median_low(others_s) if others_s else 0.0
        return times if times >= RAISE_SLOW else 0.0


def _would_take_s(worker: DiagnosedWorker, steps: StepTotals, own: StepTotals) -> float:
    """Return the mean time that another worker's decode steps would take on this one.

    Its model is scaled to what `own`, its own steps, have really taken: models lag behind a host that has become slow.
    """
    scale = own.decode_s / own.num_decode_steps / worker.decode_step_s(*_mean_shape(own))
    return scale * worker.decode_step_s(*_mean_shape(steps))


def _mean_shape(steps: StepTotals) -> tuple[float, float]:
    """Return the mean batch of decode steps, and the mean context of its sequences."""
    return steps.num_decodes / steps.num_decode_steps, steps.num_context_tokens / max(1, steps.num_decodes)
