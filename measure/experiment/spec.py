"""An experiment's YAML file, typed and checked before anything is started.

Every problem is reported as `file:key: reason`.
"""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.config import SloConfig
from common.slo import Slo
from measure.experiment.shapes import Shape
from measure.experiment.simulate_spec import SimulateSpec

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A settings mapping of serving.yaml or of a workload, or the path of a file that holds one.
Inline = dict[str, Any] | Path


class ExperimentError(Exception):
    """An experiment cannot be run as it is described; the message names file, key and reason."""


class Order(enum.StrEnum):
    """In which order cells are run."""

    ALTERNATING = "alternating"
    """Every repeat runs all arms, every other one backwards: what drifts on the machine hits all arms alike."""
    BY_ARM = "by_arm"
    """All of an arm before the next: each cluster is started once."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExternalSpec(_Section):
    """A server that somebody else has started, measured beside ours."""

    name: Annotated[str, Field(min_length=1)]
    url: Annotated[str, Field(min_length=1)]
    """HOST:PORT of a kvrelay router, or http://…/v1 of an OpenAI-compatible server."""
    workers: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each of them."""
    api_key_env: str | None = None
    """The environment variable that holds the API key."""


class CapacitySpec(_Section):
    """What `--find-capacity` looks for, and how long."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """So many of the requests must be good."""
    kinds: tuple[str, ...] = ()
    """Only requests of these kinds count; empty: all."""
    low: PositiveFloat = 0.01
    """No lower load is tried; requests per second."""
    high: PositiveFloat = 10_000.0
    """No higher one."""
    start: PositiveFloat | None = None
    """First load; default: the first one of `loads`."""
    start_per_worker: PositiveFloat | None = None
    """First load for each of an arm's workers, in place of `start`, where arms differ much in size."""
    precision: Annotated[float, Field(ge=0.005, lt=1)] = 0.05
    """The search ends when the lowest load that failed is by this share above the highest one that did not."""
    repeats: Annotated[int, Field(ge=1)] = 2
    """Runs per load; fewer where the first ones leave no doubt."""
    max_loads: Annotated[int, Field(ge=1)] = 20
    """The search ends after so many loads, with what is known then."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high: {self.high:g}")
        if self.start is not None and self.start_per_worker is not None:
            raise ValueError("say one of start and start_per_worker")
        if self.start is not None and not self.low <= self.start <= self.high:
            raise ValueError(f"start: {self.start:g} is not between low: {self.low:g} and high: {self.high:g}")
        return self

    def first_load(self, num_workers: int, *, default: float) -> float:
        """Return where the search of an arm with so many workers begins."""
        if self.start_per_worker is None:
            return default if self.start is None else self.start
        return min(max(self.start_per_worker * num_workers, self.low), self.high)


class ExperimentSpec(_Section):
    """All of an experiment's file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,60}$")]
    serving: Inline = {}
    """What all arms have in common: a serving.yaml, inline or a path relative to this file."""
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)]
    external: tuple[ExternalSpec, ...] = ()
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    """Keys of serving.yaml with dots, and the values to try, in all combinations; `pools.KEY` means both pools."""
    workload: Inline
    """What is asked: a workload, inline or a path."""
    loads: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """Requests per second, in the mean."""
    repeats: Annotated[int, Field(ge=1)] = 3
    duration_s: PositiveFloat = 60.0
    """Measured time of a cell."""
    warm_up_s: Annotated[float, Field(ge=0)] = 5.0
    """Load before that, under which nothing counts; and as much, thrown away, after each start of a cluster."""
    drain_s: PositiveFloat = 30.0
    """How long answers may take after the last session has begun; what runs then is cancelled, and not good."""
    order: Order = Order.ALTERNATING
    seed: Annotated[int, Field(ge=0)] = 0
    slo: SloConfig = SloConfig()
    """Sent with every request, and what a good one has to meet."""
    capacity: CapacitySpec = CapacitySpec()
    simulate: SimulateSpec = SimulateSpec()

    @property
    def objectives(self) -> Slo:
        """The objectives as the measures take them."""
        return Slo(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s, ttft_tokens=self.slo.ttft_tokens)

    def for_simulation(self) -> "ExperimentSpec":
        """Return the experiment with what its `simulate` section says otherwise, and without external servers."""
        simulate = self.simulate
        changes: dict[str, Any] = {"external": ()}
        for key in ("shapes", "loads", "repeats"):
            value = getattr(simulate, key)
            if value is not None:
                changes[key] = value
        return self.model_copy(update=changes)


def load_experiment(path: Path) -> ExperimentSpec:
    """Read and check an experiment's file; paths in it become absolute. Raises ExperimentError."""
    raw = read_yaml(path)
    try:
        spec = ExperimentSpec.model_validate(raw)
    except ValidationError as error:
        raise ExperimentError("\n".join(_line(path, item) for item in error.errors())) from None
    return spec.model_copy(
        update={
            "serving": _resolved(spec.serving, path),
            "workload": _resolved(spec.workload, path),
            "simulate": spec.simulate.model_copy(update={"timing": _resolved(spec.simulate.timing, path)}),
        }
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ExperimentError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ExperimentError(f"{path}: must be a mapping of keys to values, not a {type(raw).__name__}")
    return raw


def inline_or_file(value: Inline, *, key: str, path: Path) -> tuple[dict[str, Any], str]:
    """Return a mapping that stands in the experiment's file or in one of its own, and where problems in it are."""
    if isinstance(value, Path):
        return read_yaml(value), str(value)
    return value, f"{path}:{key}"


def _resolved(value: Any, path: Path) -> Any:
    return (path.parent / value.expanduser()).resolve() if isinstance(value, Path) else value


def _line(path: Path, item: Mapping[str, Any]) -> str:
    # Names of types that pydantic adds to the location of a key that takes several of them.
    key = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("dict[", "lax-or-strict", "path")))
    reason = "unknown key" if item["type"] == "extra_forbidden" else str(item["msg"]).removeprefix("Value error, ")
    return f"{path}:{key}: {reason}" if key else f"{path}: {reason}"
