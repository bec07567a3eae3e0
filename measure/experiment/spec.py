"""An experiment's YAML file, typed and checked before anything is started.

Every problem is reported as `file:key: reason`.
"""

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.config import SloConfig
from common.slo import Slo
from measure.experiment.points import Goals, LoadUnit
from measure.load.session_figures import STRETCH
from measure.simulate.planners import planning_by
from measure.simulate.routers import policy_names
from measure.workload.spec import PositiveFloat, read_yaml

Inline = dict[str, Any] | Path
"""A mapping of serving.yaml or of a workload, or the path of a file that holds one."""
_Count = Annotated[int, Field(ge=1, le=1024)]
_DISAGGREGATED = re.compile(r"(\d+)\s*[pP]\s*(\d+)\s*[dD]")
_AGGREGATED = re.compile(r"(\d+)\s+aggregated")


class ExperimentError(Exception):
    """An experiment cannot be run as it is described; the message names file, key and reason."""


class CellOrder(enum.StrEnum):
    """Order in which cells are run."""

    ALTERNATING = "alternating"
    """Every repeat runs all arms, every other one backwards: a drift of the machine affects all arms alike."""
    BY_ARM = "by_arm"
    """All cells of an arm before the next: each cluster is started once."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(_Section):
    """Pool shape: "2P1D", "3 aggregated", or a mapping that says more."""

    name: str = ""
    """Name; default: "2P1D" or "3 aggregated"."""
    prefill: _Count | None = None
    """Workers of the prefill pool; needs `decode`."""
    decode: _Count | None = None
    workers: _Count | None = None
    """Aggregated workers, in place of the two pools."""
    threads: _Count | None = None
    """CPU threads of each worker."""
    serving: dict[str, Any] = {}
    """Dotted keys of serving.yaml, such as `pools.max_step_tokens`, or of `SimulatedArm`, as `simulate.planner`, and
    their values for this shape."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, raw: object) -> object:
        if not isinstance(raw, str):
            return raw
        if match := _DISAGGREGATED.fullmatch(raw.strip()):
            return {"prefill": int(match[1]), "decode": int(match[2])}
        if match := _AGGREGATED.fullmatch(raw.strip()):
            return {"workers": int(match[1])}
        raise ValueError(f"{raw!r} is not a pool shape; say 2P1D, or 3 aggregated")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        pools = (self.prefill, self.decode)
        if self.workers is None and None in pools:
            raise ValueError("say both prefill and decode, or workers for an aggregated shape")
        if self.workers is not None and pools != (None, None):
            raise ValueError("workers are aggregated: remove prefill and decode, or workers")
        return self

    @property
    def num_prefill(self) -> int:
        """Workers of the prefill pool; 0: aggregated."""
        return self.prefill or 0

    @property
    def num_decode(self) -> int:
        """Workers that decode, including aggregated ones."""
        return self.workers or self.decode or 0

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @property
    def title(self) -> str:
        """Its name, or the default one."""
        return self.name or (f"{self.prefill}P{self.decode}D" if self.num_prefill else f"{self.workers} aggregated")


class ExternalSpec(_Section):
    """A server that is already running, measured beside ours."""

    name: Annotated[str, Field(min_length=1)]
    url: Annotated[str, Field(min_length=1)]
    """HOST:PORT of a kvrelay router, or http://…/v1 of an OpenAI-compatible server."""
    workers: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of each worker."""
    api_key_env: str | None = None
    """The environment variable that holds the API key."""


class CapacitySpec(_Section):
    """Goal and limits of `--find-capacity`."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Share of the requests that must be good."""
    kinds: tuple[str, ...] = ()
    """Kinds of requests that count; empty: all."""
    low: PositiveFloat = 0.01
    """Lowest load to try; requests per second."""
    high: PositiveFloat = 10_000.0
    """Highest load to try."""
    start: PositiveFloat | None = None
    """First load; default: the first one of `loads`."""
    start_per_worker: PositiveFloat | None = None
    """First load per worker of the arm, in place of `start`, for arms that differ much in size."""
    precision: Annotated[float, Field(ge=0.005, lt=1)] = 0.05
    """The search ends when the lowest load that failed is at most this share above the highest that was served."""
    repeats: Annotated[int, Field(ge=1)] = 2
    """Runs per load."""
    max_loads: Annotated[int, Field(ge=1)] = 20
    """Number of loads after which the search ends in any case."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high: {self.high:g}")
        if self.start is not None and self.start_per_worker is not None:
            raise ValueError("say one of start and start_per_worker")
        if self.start is not None and not self.low <= self.start <= self.high:
            raise ValueError(f"start: {self.start:g} is not between low: {self.low:g} and high: {self.high:g}")
        return self


class SimulatedArm(_Section):
    """Parts of an arm that only simulations have."""

    policy: str | None = None
    """A policy of replays, in place of `router.policy`."""
    planner: str | None = None
    """A planner of the pools' sizes, see `measure/simulate/planners.py`."""
    tenants: bool = False
    """Whether every stream is a tenant of its own."""

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str | None) -> str | None:
        if name is not None and name not in policy_names():
            raise ValueError(f"{name!r} is not a policy; known are {', '.join(policy_names())}")
        return name

    @field_validator("planner")
    @classmethod
    def _known_planner(cls, name: str | None) -> str | None:
        if name is not None:
            planning_by(name, Slo(ttft_s=1.0, tpot_s=1.0))
        return name


class TierSpec(_Section):
    """A tier of each simulated worker."""

    gib: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Its size in GiB."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """Its size in blocks, in place of `gib`."""
    gb_per_s: PositiveFloat
    """Rate at which blocks are read from it, in 10⁹ bytes per second."""

    @model_validator(mode="after")
    def _has_one_size(self) -> "TierSpec":
        if (self.gib is None) == (self.num_blocks is None):
            raise ValueError("a tier has gib or num_blocks")
        return self

    def blocks(self, block_bytes: int) -> int:
        """Return how many blocks it holds."""
        return self.num_blocks or int((self.gib or 0.0) * 2**30) // block_bytes


class SimulateSpec(_Section):
    """Differences under a virtual clock, for `--simulate`. Unset keys are as in the experiment itself."""

    model: str = "llama-70b"
    """Model of `measure.simulate.roofline`."""
    device: str = "h100-tp4"
    """Hardware of each worker."""
    timing: Path | None = None
    """Timings fitted on real workers, in place of `model` and `device`; relative to the experiment's file."""
    shapes: tuple[Shape, ...] | None = None
    loads: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    min_requests: Annotated[int, Field(ge=1)] = 1
    """Minimum number of requests in a cell, which lasts longer at low loads: virtual time is free."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Limit that requests state, all that a router knows of their answers; default: their lengths, as in load tests of
    real servers."""
    report_interval_s: Annotated[float, Field(ge=0)] = 0.1
    """Minimum time between two reports of a worker's load and KV events."""
    event_lag_s: Annotated[float, Field(ge=0)] = 0.02
    """Extra latency of reports over other messages."""
    tiers: tuple[TierSpec, ...] = ()
    """Tiers of each worker, the first one first."""
    serving: dict[str, Any] = {}
    """Dotted keys of serving.yaml, and their values."""


class ExperimentSpec(_Section):
    """An experiment's file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,60}$")]
    serving: Inline = {}
    """serving.yaml that all arms share, inline or a path relative to this file."""
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)]
    external: tuple[ExternalSpec, ...] = ()
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    """Such dotted keys and the values to try, in all combinations; `pools.KEY` means both pools."""
    workload: Inline
    """Workload, inline or a path."""
    loads: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """Mean requests per second; in a workload of closed loops alone, sessions at a time."""
    repeats: Annotated[int, Field(ge=1)] = 3
    duration_s: PositiveFloat = 60.0
    """Measured time of a cell."""
    warm_up_s: Annotated[float, Field(ge=0)] = 5.0
    """Time of load before the measured time; the same time again, discarded, after each start of a cluster."""
    drain_s: PositiveFloat = 30.0
    """Time for answers after the last session has begun; requests that still run then are cancelled, and not good."""
    order: CellOrder = CellOrder.ALTERNATING
    seed: Annotated[int, Field(ge=0)] = 0
    slo: SloConfig = SloConfig()
    """Objectives that every request states and a good one meets."""
    stretch: PositiveFloat = STRETCH
    """Stretch of a good session: its waiting by that on an idle server."""
    capacity: CapacitySpec = CapacitySpec()
    simulate: SimulateSpec = SimulateSpec()

    @property
    def objectives(self) -> Slo:
        """Objectives for figures."""
        return Slo(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s, ttft_tokens=self.slo.ttft_tokens)

    def goals(self, load_unit: LoadUnit) -> Goals:
        """Return what is good, with the unit of the workload's loads."""
        return Goals(slo=self.objectives, stretch=self.stretch, load_unit=load_unit)

    def for_simulation(self) -> "ExperimentSpec":
        """Return the experiment with the changes of its `simulate` section, without external servers."""
        simulate = self.simulate
        changes: dict[str, Any] = {"external": ()}
        for key in ("shapes", "loads", "repeats"):
            value = getattr(simulate, key)
            if value is not None:
                changes[key] = value
        return self.model_copy(update=changes)


def load_experiment(path: Path) -> ExperimentSpec:
    """Read and check an experiment's file; paths in it become absolute. Raises ExperimentError."""
    raw = _read_mapping(path)
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


def _read_mapping(path: Path) -> dict[str, Any]:
    raw = read_yaml(path, refusal=ExperimentError)
    if not isinstance(raw, dict):
        raise ExperimentError(f"{path}: must be a mapping of keys to values, not a {type(raw).__name__}")
    return raw


def inline_or_file(value: Inline, *, key: str, path: Path) -> tuple[dict[str, Any], str]:
    """Return a mapping that is inline or in a file of its own, and the location that messages name."""
    if isinstance(value, Path):
        return _read_mapping(value), str(value)
    return value, f"{path}:{key}"


def _resolved(value: Any, path: Path) -> Any:
    return (path.parent / value.expanduser()).resolve() if isinstance(value, Path) else value


def _line(path: Path, item: Mapping[str, Any]) -> str:
    # Names of types that pydantic adds to the location of a key that takes several of them.
    key = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("dict[", "lax-or-strict", "path")))
    reason = "unknown key" if item["type"] == "extra_forbidden" else str(item["msg"]).removeprefix("Value error, ")
    return f"{path}:{key}: {reason}" if key else f"{path}: {reason}"
