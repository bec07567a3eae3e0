"""Turns an experiment's file and a command line into an experiment that is checked and can run."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from common.config import ServingConfig
from common.model_files import ModelNotFound, resolve_model
from engine.weights.config import UnsupportedModel, read_json
from engine.weights.rope_config import longest_text
from measure.experiment.arms import ArmPlans, build_arms
from measure.experiment.points import Cell, LoadUnit, Source
from measure.experiment.runner import cell_order
from measure.experiment.spec import ExperimentError, ExperimentSpec, inline_or_file, load_experiment
from measure.experiment.store import Store
from measure.workload.build import build_workload
from measure.workload.sessions import Session, Workload
from measure.workload.spec import WorkloadError, WorkloadSpec, parse_workload
from measure.workload.traces import TraceError

_WARM_UP_REPEAT = -1
_MAX_CHECKED = 20_000
"""Sessions of a cell whose lengths are checked beforehand; closed loops may have no end."""


class SimulatedWorkloads(Protocol):
    """Workloads of simulated cells."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Specification as JSON; results depend on it."""

    @property
    def load_unit(self) -> LoadUnit:
        """What the loads count."""

    def num_requests(self, load: float, *, seconds: float) -> float | None:
        """Return about how many requests come in a cell of a duration; None: not known."""

    def simulated(self, cell: Cell, *, seconds: float) -> Workload:
        """Return a cell's workload, of a duration unless it has one of its own: equal for all arms."""

    def longest_tokens(self) -> int:
        """Return the tokens of the longest request of all cells, its answer included. Raises ExperimentError."""


class Workloads:
    """Builds the cells' workloads: equal for all arms, with contents that were never asked before."""

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

    @property
    def load_unit(self) -> LoadUnit:
        """What the loads count."""
        is_closed = all(getattr(stream, "concurrency", None) is not None for stream in self.spec.streams)
        return LoadUnit.SESSIONS if is_closed else LoadUnit.REQUESTS

    def num_requests(self, load: float, *, seconds: float) -> float | None:
        """Return about how many requests come in a cell of a duration; None: it depends on the answers."""
        return load * seconds if self.load_unit is LoadUnit.REQUESTS else None

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
        """Return the tokens of the longest request of all cells, its answer included. Raises ExperimentError."""
        return max(map(num_longest_tokens, self._sessions()), default=0)

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
            if self.load_unit is LoadUnit.SESSIONS:
                return build_workload(spec, sessions=load, seed=seed)
            return build_workload(spec, load=load, seed=seed)
        except OSError as error:
            raise ExperimentError(f"workload: {error.filename}: {error.strerror}") from None
        except (WorkloadError, TraceError) as error:
            raise ExperimentError(f"workload: {error}") from None


def num_longest_tokens(session: Session) -> int:
    """Return the tokens of a session's longest request, its answer included."""
    lengths = zip(session.prompt_lengths(), session.turns, strict=True)
    return max(length + turn.num_output_tokens for length, turn in lengths)


def _seed(seed: int, which: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {which}".encode(), digest_size=4).digest(), "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Choices of the command line."""

    source: Source = Source.REAL
    only: tuple[str, ...] = ()
    """Names of arms or shapes; empty: all."""
    loads: tuple[float, ...] = ()
    """Loads in place of the file's; empty: those of the file."""


_W = TypeVar("_W", bound=SimulatedWorkloads, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[_W]):
    """An experiment that can run."""

    spec: ExperimentSpec
    path: Path
    source: Source
    arms: ArmPlans
    workloads: _W

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they run."""
        names = [plan.arm.name for plan in self.arms.plans]
        return cell_order(names, self.spec.loads, repeats=self.spec.repeats, order=self.spec.order)

    def claim(self, store: Store) -> None:
        """Claim the folder for this experiment. Raises OtherSettings when it holds results of other settings."""
        store.claim(self.fingerprint())
        store.keep_file(self.path)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that results depend on, as JSON: more arms, loads or repeats change none."""
        spec = self.spec
        common: dict[str, Any] = {
            key: getattr(spec, key) for key in ("duration_s", "warm_up_s", "drain_s", "seed", "stretch")
        }
        common |= {"slo": spec.slo.model_dump(), "workload": self.workloads.fingerprint}
        if self.source is Source.SIMULATED:
            common["simulate"] = _of_simulation(spec)
        for plan in self.arms.plans:
            of_arm = {"url": plan.url} if plan.serving is None else plan.serving.model_dump(mode="json")
            simulated = plan.simulated.model_dump(exclude_defaults=True)
            common[f"arm {plan.arm.name}"] = of_arm | {f"simulate.{key}": value for key, value in simulated.items()}
        return {f"{self.source.value} {key}": value for key, value in common.items()}


def prepare(path: Path, choices: Choices) -> Experiment[Workloads]:
    """Read and check an experiment: its file, every arm's configuration, the workload. Raises ExperimentError."""
    spec = load_experiment(path)
    overrides: dict[str, Any] = {}
    if choices.source is Source.SIMULATED:
        spec = spec.for_simulation()
        overrides = spec.simulate.serving
    if choices.loads:
        spec = spec.model_copy(update={"loads": choices.loads})
    arms = build_arms(spec, path=path, overrides=overrides)
    if choices.only:
        arms = arms.only(choices.only)
    if choices.source is Source.REAL:
        _check_real(arms)
    workloads = Workloads(spec, path=path)
    experiment = Experiment(spec=spec, path=path, source=choices.source, arms=arms, workloads=workloads)
    check_lengths(experiment)
    return experiment


def _check_real(arms: ArmPlans) -> None:
    for plan in arms.plans:
        for key in plan.simulated.model_fields_set:
            raise ExperimentError(f"arm {plan.arm.name}: simulate.{key} is for simulations; run it with --simulate")


def check_lengths(experiment: Experiment[SimulatedWorkloads]) -> None:
    """Raise ExperimentError unless every arm of ours can hold the longest session."""
    longest = experiment.workloads.longest_tokens()
    for serving in (plan.serving for plan in experiment.arms.plans if plan.serving is not None):
        is_real = experiment.source is Source.REAL
        limit = serving.model.max_model_len or (_trained_len(serving) if is_real else None)
        holds = serving.pools.decode
        if limit is not None and longest > limit:
            reason = f"{serving.model.id} takes {limit}"
        elif holds.num_blocks is not None and longest > holds.num_blocks * holds.block_size:
            reason = f"a decode worker has {holds.num_blocks} pages of {holds.block_size}"
        else:
            continue
        raise ExperimentError(f"workload: its longest request has {longest} tokens, the answer included; {reason}")


def _trained_len(serving: ServingConfig) -> int | None:
    """Return the checkpoint's maximum length; None if it is unknown before loading."""
    if serving.model.engine == "fake":
        return None
    try:
        folder = resolve_model(serving.model.id, local_files_only=True)
        return longest_text(read_json(folder / "config.json"))
    except (ModelNotFound, UnsupportedModel):
        return None


def _of_simulation(spec: ExperimentSpec) -> dict[str, Any]:
    simulate = spec.simulate.model_dump(mode="json", exclude={"shapes", "loads", "repeats", "serving"})
    if spec.simulate.timing is not None:
        simulate["timing"] = hashlib.blake2b(spec.simulate.timing.read_bytes(), digest_size=16).hexdigest()
    return simulate
