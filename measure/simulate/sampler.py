"""Samples of the workers' load at equal intervals."""

import asyncio
from collections.abc import Sequence

from measure.load.records import PoolSample, WorkerSample
from measure.simulate.loop import VirtualLoop
from measure.simulate.worker import POOLS, SimWorker
from router.parts import RouterParts


class Sampler:
    """Notes every worker's load at equal intervals. Changes nothing. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, workers: Sequence[SimWorker], routers: Sequence[RouterParts], interval_s: float | None
    ) -> None:
        """`interval_s`: None takes no samples."""
        self._loop = loop
        self._workers = workers
        self._routers = routers
        self._interval_s = interval_s
        self._begin_s = 0.0
        self._samples: list[PoolSample] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take a sample now and after every interval."""
        self._begin_s = self._loop.time()
        if self._interval_s is not None:
            self._take(self._interval_s)

    def stop(self) -> tuple[PoolSample, ...]:
        """Stop and return the samples, with times since the start."""
        if self._timer is not None:
            self._timer.cancel()
        return tuple(self._samples)

    def _take(self, interval_s: float) -> None:
        self._samples.append(
            PoolSample(
                at_s=self._loop.time() - self._begin_s,
                num_queued=sum(router.admission.num_queued for router in self._routers),
                workers=tuple(map(_worker_sample, self._workers)),
            )
        )
        self._timer = self._loop.call_later(interval_s, self._take, interval_s)


def _worker_sample(worker: SimWorker) -> WorkerSample:
    load = worker.engine.core.load()
    return WorkerSample(
        worker_id=worker.endpoint.worker_id,
        role=POOLS[worker.endpoint.role],
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_used_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_computed_tokens=load.num_computed_tokens,
        num_cached_tokens=load.num_cached_tokens,
        busy_s=worker.engine.busy_s,
    )
