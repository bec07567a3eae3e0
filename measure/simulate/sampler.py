"""Looks at the workers now and then."""

import asyncio
from collections.abc import Sequence

from measure.simulate.loop import VirtualLoop
from measure.simulate.records import LoadSample
from measure.simulate.worker import SimWorker


class Sampler:
    """Notes every worker's load in equal intervals. Changes nothing. Event loop only."""

    def __init__(self, loop: VirtualLoop, workers: Sequence[SimWorker], interval_s: float | None) -> None:
        """`interval_s`: None: never look."""
        self._loop = loop
        self._workers = workers
        self._interval_s = interval_s
        self._begin_s = 0.0
        self._samples: list[LoadSample] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and from now on."""
        self._begin_s = self._loop.time()
        if self._interval_s is not None:
            self._look(self._interval_s)

    def stop(self) -> list[LoadSample]:
        """Look no more; returns what was seen, times since the start."""
        if self._timer is not None:
            self._timer.cancel()
        return self._samples

    def _look(self, interval_s: float) -> None:
        engines = [worker.engine for worker in self._workers]
        loads = [engine.core.load() for engine in engines]
        self._samples.append(
            LoadSample(
                at_s=self._loop.time() - self._begin_s,
                busy_s=tuple(engine.busy_s for engine in engines),
                used_share=tuple(load.num_used_blocks / load.num_blocks for load in loads),
            )
        )
        self._timer = self._loop.call_later(interval_s, self._look, interval_s)
