"""One pool as a diagnosis sees it: what its workers did in a window, and how fast they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from common.ids import WorkerId
from common.timing import TimingModel
from kvrelay.v1 import worker_pb2

StepTotals = worker_pb2.StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker of the pool that answers."""

    worker_id: WorkerId
    status: worker_pb2.WorkerStatus
    timing: TimingModel
    slowness: float = 0.0
    """Multiple of the step time of the pool's other workers while it counts as slow; else 0."""

    def steps(self, window_s: float) -> StepTotals:
        """Return the totals of the shortest window that covers `window_s`, or of the longest one."""
        known = sorted(self.status.recent_steps, key=lambda totals: totals.window_s)
        return next((totals for totals in known if totals.window_s >= window_s), known[-1] if known else StepTotals())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The workers of a role."""

    name: str
    """"prefill" or "decode"."""
    workers: tuple[Worker, ...]
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

    def decode_step_s(self, batch: float, context: float) -> tuple[float, float, float]:
        """Return median, least and largest prediction, over the workers, of a decode step.

        It decodes `batch` sequences with `context` KV tokens each.
        """

        def predict(timing: TimingModel) -> float:
            model = timing.decode
            return model.constant_s + batch * (model.per_decode_s + model.per_context_token_s * context)

        return self._over_workers(predict)

    def prefill_token_s(self) -> float:
        """Return the median over the workers of the time that a prompt token takes in a full step."""

        def predict(timing: TimingModel) -> float:
            return timing.prefill_s(timing.max_step_tokens, 0) / timing.max_step_tokens

        return self._over_workers(predict)[0]

    def _over_workers(self, predict: Callable[[TimingModel], float]) -> tuple[float, float, float]:
        predicted = [predict(worker.timing) for worker in self.workers] or [0.0]
        return median(predicted), min(predicted), max(predicted)

    @property
    def slow_workers(self) -> Mapping[WorkerId, float]:
        """Workers that count as slow, and how many times slower their steps are."""
        return {worker.worker_id: worker.slowness for worker in self.workers if worker.slowness}
