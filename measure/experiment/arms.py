"""Arms of an experiment: every pool shape with every combination of the grid, checked."""

import copy
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config import ConfigError, ServingConfig, parse_config
from measure.experiment.points import Arm
from measure.experiment.spec import ExperimentError, ExperimentSpec, ExternalSpec, Shape, SimulatedArm, inline_or_file

_POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """An arm and how to serve it."""

    arm: Arm
    serving: ServingConfig | None
    """Cluster to start; None: the arm is served elsewhere."""
    url: str = ""
    """Address of an arm that is served elsewhere."""
    api_key_env: str | None = None
    simulated: SimulatedArm = field(default_factory=SimulatedArm)

    @property
    def api_key(self) -> str | None:
        """API key from the environment. Raises ExperimentError when it is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if key is None:
            raise ExperimentError(f"{self.arm.name}: {self.api_key_env} is not set; put the API key there")
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlans:
    """All arms of an experiment."""

    plans: tuple[ArmPlan, ...]
    added: tuple[str, ...]
    """Aggregated shapes that the file does not name."""

    def only(self, names: tuple[str, ...]) -> "ArmPlans":
        """Return the arms with one of these full names or shapes. Raises ExperimentError."""
        for name in names:
            if not any(_is_named(plan, name) for plan in self.plans):
                known = ", ".join(plan.arm.name for plan in self.plans)
                raise ExperimentError(f"there is no arm {name!r}; there are {known}")
        chosen = tuple(plan for plan in self.plans if any(_is_named(plan, name) for name in names))
        return ArmPlans(plans=chosen, added=self.added)


def build_arms(spec: ExperimentSpec, *, path: Path, overrides: Mapping[str, Any] | None = None) -> ArmPlans:
    """Return the arms; `overrides` are keys of serving.yaml for all of them. Raises ExperimentError.

    An aggregated arm of as many workers, or threads in total, is a fair comparison for a disaggregated one. If the file
    names none, one with as many workers is added, but for a split whose sizes a planner changes. `path` is the file,
    which messages name.
    """
    builder = _Builder(spec, path, overrides or {})
    plans = [plan for shape in spec.shapes for plan in builder.plans(shape)]
    added = []
    for shape in spec.shapes:
        first = builder.plans(shape)[0]
        is_fixed_split = first.arm.num_prefill > 0 and first.simulated.planner is None
        if is_fixed_split and not any(not plan.arm.num_prefill and plan.arm.equals(first.arm) for plan in plans):
            whole = Shape(workers=shape.num_workers, threads=shape.threads, serving=shape.serving)
            plans += builder.plans(whole)
            added.append(whole.title)
    plans += [_external(each) for each in spec.external]
    names = [plan.arm.name for plan in plans]
    for name in names:
        if names.count(name) > 1:
            raise ExperimentError(f"{path}:shapes: two arms are called {name}; give one of them another name")
    return ArmPlans(plans=tuple(plans), added=tuple(added))


class _Builder:
    """Builds the arms of shapes."""

    def __init__(self, spec: ExperimentSpec, path: Path, overrides: Mapping[str, Any]) -> None:
        self._path = path
        self._grid = tuple(dict(zip(spec.grid, each, strict=True)) for each in itertools.product(*spec.grid.values()))
        self._base, self._source = inline_or_file(spec.serving, key="serving", path=path)
        self._overrides = overrides
        self._fixed = {"name": spec.name[:41], "slo": spec.slo.model_dump(), "router.port": 0}

    def plans(self, shape: Shape) -> list[ArmPlan]:
        """Return a shape's arms, one for each combination of the grid. Raises ExperimentError."""
        return [self._plan(shape, chosen) for chosen in self._grid]

    def _plan(self, shape: Shape, chosen: Mapping[str, Any]) -> ArmPlan:
        settings = {key.rpartition(".")[2]: _text(value) for key, value in chosen.items()}
        if len(settings) < len(chosen):
            settings = {key: _text(value) for key, value in chosen.items()}
        name = " ".join([shape.title, *(f"{key}={value}" for key, value in settings.items())])
        raw = {"launcher": "local", "simulate": {}} | copy.deepcopy(self._base)
        keys = {**self._overrides, **_shape_keys(shape), **shape.serving, **chosen, **self._fixed}
        for key, value in keys.items():
            _set(raw, key, value, source=f"{self._path}: arm {name}")
        simulated = _simulated(raw.pop("simulate"), source=f"{self._path}: arm {name}")
        serving = _checked(raw, source=f"{self._source}: arm {name}")
        threads = {pool.threads for pool in (serving.pools.prefill, serving.pools.decode) if pool.count}
        if len(threads) == 1 and "auto" not in threads:
            settings["threads"] = _text(threads.pop())
        arm = Arm(name=name, num_prefill=shape.num_prefill, num_decode=shape.num_decode, settings=settings)
        return ArmPlan(arm=arm, serving=serving, simulated=simulated)


def _external(external: ExternalSpec) -> ArmPlan:
    arm = Arm(
        name=external.name,
        num_prefill=0,
        num_decode=external.workers,
        settings={} if external.threads is None else {"threads": str(external.threads)},
        is_external=True,
    )
    return ArmPlan(arm=arm, serving=None, url=external.url, api_key_env=external.api_key_env)


def _shape_keys(shape: Shape) -> dict[str, Any]:
    keys: dict[str, Any] = {"pools.prefill.count": shape.num_prefill, "pools.decode.count": shape.num_decode}
    return keys if shape.threads is None else keys | {"pools.threads": shape.threads}


def _set(raw: dict[str, Any], key: str, value: Any, *, source: str) -> None:
    """Set a dotted key in a nested mapping; `pools.KEY` in both pools. Mutates `raw`."""
    parts = key.split(".")
    if parts[0] == "pools" and len(parts) == 2 and parts[1] not in _POOLS:
        for pool in _POOLS:
            _set(raw, f"pools.{pool}.{parts[1]}", value, source=source)
        return
    section = raw
    for part in parts[:-1]:
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ExperimentError(f"{source}:{key}: {part} holds no keys")
        section = inner
    section[parts[-1]] = value


def _simulated(raw: dict[str, Any], *, source: str) -> SimulatedArm:
    try:
        return SimulatedArm.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("simulate", *first["loc"])))
        raise ExperimentError(f"{source}:{key}: {first['msg'].removeprefix('Value error, ')}") from None


def _checked(raw: dict[str, Any], *, source: str) -> ServingConfig:
    try:
        return parse_config(raw, source=source)
    except ConfigError as error:
        raise ExperimentError(str(error)) from None


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_named(plan: ArmPlan, name: str) -> bool:
    return plan.arm.name == name or plan.arm.name.startswith(f"{name} ")
