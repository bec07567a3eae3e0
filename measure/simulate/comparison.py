"""A grid of replays: policies times speeds, several at a time, resumed where an earlier try ended."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from measure.simulate.replay import Cell, CellResult, ReplayError, ReplaySettings, load_trace, read_cell, run_cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to run, and where its results go."""

    settings: ReplaySettings
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    out: Path

    @property
    def cells(self) -> tuple[Cell, ...]:
        """By speed, then by policy."""
        return tuple(Cell(policy=policy, speed=speed) for speed in self.speeds for policy in self.policies)

    def folder(self, cell: Cell) -> Path:
        """Return where a cell's files are."""
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
        """Remove earlier results from the folder, and nothing else that is in it."""
        (self.out / "settings.json").unlink(missing_ok=True)
        for summary in self.out.glob("cells/*/summary.json"):
            summary.unlink()

    def run(self, *, num_jobs: int, report: Callable[[CellResult], None]) -> list[CellResult]:
        """Run every cell that is not finished and return all, in the order of `cells`.

        `report` hears of each as it ends. Processes run cells of their own when there is more than one job; they end
        with the first error, which is raised, or the first interrupt. Finished cells stay.
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
            yield from self._in_processes(missing, num_jobs)

    def _in_processes(self, cells: Sequence[Cell], num_jobs: int) -> Iterator[CellResult]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
            try:
                futures = [pool.submit(run_cell, self.settings, cell, self.folder(cell)) for cell in cells]
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
