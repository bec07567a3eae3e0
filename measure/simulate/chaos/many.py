"""Runs many walks, several at a time, each in a process of its own."""

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

from measure.simulate.chaos.settings import ChaosReport, ChaosSettings
from measure.simulate.chaos.walk import run_walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A walk that has ended, and the CPU time that it took."""

    settings: ChaosSettings
    report: ChaosReport
    cpu_s: float


def walk_all(walks: Iterable[ChaosSettings], *, jobs: int, log_level: int) -> Iterator[Walked]:
    """Run walks, so many at a time, each in a process of its own if there are several; yields them as they end.

    The next walk is taken when one has ended.
    """
    if jobs == 1:
        logging.basicConfig(level=log_level)
        yield from map(walk_one, walks)
        return
    rest, running = iter(walks), set[Future[Walked]]()
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=logging.basicConfig, max_tasks_per_child=200
    ) as pool:
        while True:
            running |= {pool.submit(walk_one, settings, log_level) for settings in islice(rest, jobs - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def walk_one(settings: ChaosSettings, log_level: int | None = None) -> Walked:
    """Run one walk in this process."""
    if log_level is not None:
        logging.getLogger().setLevel(log_level)
    begun_s = time.process_time()
    report = run_walk(settings)
    return Walked(settings=settings, report=report, cpu_s=time.process_time() - begun_s)
