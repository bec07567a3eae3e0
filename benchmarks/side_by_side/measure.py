"""Runs every arm under the same loads."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import in_turn
from benchmarks.side_by_side.arms import Arms
from common.slo import Slo
from measure.load.measures import summarize
from measure.load.records import Run
from measure.load.run import run_load
from measure.load.spec import LoadSpec
from measure.load.store import write_run
from measure.load.summary import Summary
from measure.load.targets.interface import TargetSpec
from measure.workload.build import build_workload
from measure.workload.spec import WorkloadSpec

_WARM_UP_SEED = 1_000_000

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases that are run."""

    arms: tuple[str, ...]
    workload: WorkloadSpec
    loads: tuple[float, ...]
    """Requests per second."""
    repeats: int
    warm_up_s: float
    slo: Slo
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    arm: str
    load: float
    repeat: int

    @property
    def folder(self) -> str:
        """Folder of the results."""
        return f"{self.arm}-{self.load:g}-{self.repeat}"


def cells(plan: Plan) -> Iterator[Cell]:
    """Yield the runs in order: arms take turns, backwards in every other repeat."""
    for repeat in range(plan.repeats):
        for load in plan.loads:
            for arm in in_turn(plan.arms, repeat):
                yield Cell(arm=arm, load=load, repeat=repeat)


async def run_cell(cell: Cell, url: str, plan: Plan) -> Run:
    """Warm up, then measure. Raises KvrelayError."""
    target = TargetSpec(url=url)
    # No two cells of an arm have a seed in common: what stays up must not find an earlier cell's sessions in its cache.
    seed = plan.workload.seed + cell.repeat * len(plan.loads) + plan.loads.index(cell.load)
    warm_up = plan.workload.model_copy(update={"duration_s": plan.warm_up_s})
    await run_load(
        LoadSpec(
            name="warm-up",
            target=target,
            workload=build_workload(warm_up, load=cell.load, seed=_WARM_UP_SEED + seed),
        )
    )
    return await run_load(
        LoadSpec(
            name=cell.arm,
            target=target,
            workload=build_workload(plan.workload, load=cell.load, seed=seed),
            specification=plan.workload.model_dump(mode="json"),
            slo=plan.slo,
            labels={
                "arm": cell.arm,
                "load": f"{cell.load:g}",
                "repeat": str(cell.repeat),
            },
        )
    )


def measure(plan: Plan, arms: Arms, report: Report) -> dict[Cell, Summary]:
    """Run every cell and keep each. Raises KvrelayError, StoreError."""
    measured: dict[Cell, Summary] = {}
    for cell in cells(plan):
        with arms.serving(cell.arm) as url:
            idle_before_s, started_s = arms.idle_cpu_s(cell.arm), time.monotonic()
            run = asyncio.run(run_cell(cell, url, plan))
            idle_share = (arms.idle_cpu_s(cell.arm) - idle_before_s) / (time.monotonic() - started_s)
        write_run(run, plan.out / cell.folder)
        measured[cell] = summarize(run, slo=plan.slo)
        report(f"{cell.folder}: {_one_line(measured[cell])}; idle peers used {idle_share:.1%} of a core")
        for warning in measured[cell].warnings:
            report(f"    {warning}")
    return measured


def _one_line(summary: Summary) -> str:
    kind = summary.overall
    return f"{kind.num_complete} of {kind.num_requests} answered, {kind.num_good} within objectives"
