"""A grid of replays, policies times speeds, several at a time; finished cells are kept."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from measure.simulate.replay import Cell, CellResult, ReplayError, ReplaySettings, load_trace, read_cell, run_cell

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Cells to run, and the folder of their results."""

    settings: ReplaySettings
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    out: Path

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, by speed, then by policy."""
        return tuple(Cell(policy=policy, speed=speed) for speed in self.speeds for policy in self.policies)

    def folder(self, cell: Cell) -> Path:
        """Return the folder of a cell's files."""
        return self.out / "cells" / cell.name

    def prepare(self) -> None:
        """Check the trace and claim the folder. Raises ReplayError when it holds results of other settings."""
        load_trace(self.settings)
        ours = json.loads(json.dumps(self.settings.fingerprint()))
        path = self.out / "settings.json"
        if path.exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            changed = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
            if changed:
                raise ReplayError(
                    f"{self.out} holds results of other settings ({', '.join(changed)} differ);"
                    " name another folder with --out, or replace them with --again"
                )
            return
        self.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")

    def forget(self) -> None:
        """Remove earlier results from the folder, and nothing else."""
        (self.out / "settings.json").unlink(missing_ok=True)
        for summary in self.out.glob("cells/*/summary.json"):
            summary.unlink()

    def run(self, *, num_jobs: int, report: Callable[[CellResult], None]) -> list[CellResult]:
        """Run the cells that are not finished and return all, in the order of `cells`.

        `report` is called with each result. With several jobs each cell runs in a process of its own; all end at the
        first error, which is raised, or the first interrupt. Finished cells stay.
        """
        done: dict[Cell, CellResult] = {}
        for result in self._results(num_jobs):
            done[result.cell] = result
            report(result)
        return [done[cell] for cell in self.cells]

    def _results(self, num_jobs: int) -> Iterator[CellResult]:
        missing: list[Cell] = []
        for cell in self.cells:
            earlier = read_cell(cell, self.folder(cell))
            if earlier is None:
                missing.append(cell)
            else:
                yield earlier
        if num_jobs == 1 or len(missing) <= 1:
            for cell in missing:
                yield run_cell(self.settings, cell, self.folder(cell))
        else:
            tasks = [(self.settings, cell, self.folder(cell)) for cell in missing]
            yield from in_processes(run_cell, tasks, num_jobs=num_jobs)


def in_processes(run: Callable[..., R], tasks: Sequence[tuple[Any, ...]], *, num_jobs: int) -> Iterator[R]:
    """Yield the results of `run` for each tuple of arguments, each from a process of its own, as they end.

    The first error, which is raised, or an interrupt ends all processes at once.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run, *arguments) for arguments in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # an interrupt, too: running tasks may take minutes
            for future in futures:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise
