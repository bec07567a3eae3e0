"""Workloads of an experiment's cells: equal for all arms, with contents that were never asked before."""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure.experiment.spec import ExperimentError, ExperimentSpec, inline_or_file
from measure.experiment.store import Cell
from measure.workload.build import build_workload
from measure.workload.sessions import Session, Workload
from measure.workload.spec import WorkloadError, WorkloadSpec, parse_workload
from measure.workload.traces import TraceError

_WARM_UP_REPEAT = -1
_MAX_CHECKED = 20_000
"""Sessions of a cell whose lengths are checked beforehand; closed loops may have no end."""


class Workloads:
    """Builds the cells' workloads."""

    def __init__(self, experiment: ExperimentSpec, *, path: Path) -> None:
        """Check the workload of the experiment's file at `path`. Raises ExperimentError."""
        self._experiment = experiment
        raw, source = inline_or_file(experiment.workload, key="workload", path=path)
        folder = Path(source).parent if isinstance(experiment.workload, Path) else path.parent
        seconds = experiment.warm_up_s + experiment.duration_s
        try:
            self.spec = parse_workload(
                {"name": experiment.name, **raw, "duration_s": seconds}, source=source, folder=folder
            )
        except WorkloadError as error:
            inline = f"{path}:workload"
            raise ExperimentError(str(error).replace(f"{inline}:", f"{inline}.")) from None
        kinds = [stream.name for stream in self.spec.streams]
        for kind in experiment.capacity.kinds:
            if kind not in kinds:
                raise ExperimentError(f"{path}:capacity.kinds: no stream sends {kind!r}; there are {', '.join(kinds)}")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Specification as JSON; results depend on it."""
        return self.spec.model_dump(mode="json")

    def of(self, cell: Cell) -> Workload:
        """Return a cell's workload: equal for all arms, with contents that no other load or repeat has.

        Raises ExperimentError.
        """
        seed = _seed(self._experiment.seed, f"{cell.load!r} {cell.repeat}")
        return self._build(cell.load, seed=seed, spec=self.spec)

    def simulated(self, cell: Cell, *, seconds: float) -> Workload:
        """Return a simulated cell's workload of a duration: equal for all arms, with the same sessions at every load.

        Differences between arms and loads are then not due to the draws (common random numbers). Every cell begins with
        empty caches, so that no load finds contents of another. Raises ExperimentError.
        """
        spec = self.spec.model_copy(update={"duration_s": seconds})
        return self._build(cell.load, seed=_seed(self._experiment.seed, f"{cell.repeat}"), spec=spec)

    def warm_up(self) -> Workload:
        """Return the workload after a start, whose results are discarded: the lowest load, as long as the warm-up."""
        spec = self.spec.model_copy(update={"duration_s": max(self._experiment.warm_up_s, 1e-3)})
        load = min(self._experiment.loads)
        return self._build(load, seed=_seed(self._experiment.seed, f"{load!r} {_WARM_UP_REPEAT}"), spec=spec)

    def longest_tokens(self) -> int:
        """Return the tokens of the longest session of all cells, prompts and answers. Raises ExperimentError."""
        return max(map(_num_tokens, self._sessions()), default=0)

    def longest_thinking_s(self) -> float:
        """Return the longest total think time of a session. Raises ExperimentError."""
        return max((sum(turn.think_s for turn in session.turns) for session in self._sessions()), default=0.0)

    def _sessions(self) -> Iterator[Session]:
        """Yield the sessions of the cells with the highest load; those of the other cells are alike."""
        load = max(self._experiment.loads)
        for repeat in range(self._experiment.repeats):
            for stream in self.of(Cell(arm="", load=load, repeat=repeat)).streams:
                yield from itertools.islice(stream.sessions, _MAX_CHECKED)

    def _build(self, load: float, *, seed: int, spec: WorkloadSpec) -> Workload:
        try:
            return build_workload(spec, load=load, seed=seed)
        except (WorkloadError, TraceError, OSError) as error:
            raise ExperimentError(f"workload: {error}") from None


def _num_tokens(session: Session) -> int:
    asked = sum(segment.num_tokens for turn in session.turns for segment in turn.segments)
    return asked + sum(turn.num_output_tokens for turn in session.turns)


def _seed(seed: int, which: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {which}".encode(), digest_size=4).digest(), "little") >> 1
