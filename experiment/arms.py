"""From an experiment's file to its arms: every pool shape with every combination of the grid, checked."""

import copy
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ConfigError, ServingConfig, parse_config
from experiment.points import Arm
from experiment.shapes import Shape, with_baselines
from experiment.spec import ExperimentError, ExperimentSpec, ExternalSpec, inline_or_file

_POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """An arm, and what is needed to serve it."""

    arm: Arm
    serving: ServingConfig | None
    """What to start; None: somebody else has."""
    url: str = ""
    """Where it is, when somebody else has started it."""
    api_key_env: str | None = None

    @property
    def api_key(self) -> str | None:
        """The key from the environment. Raises ExperimentError when it is not there."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if key is None:
            raise ExperimentError(f"{self.arm.name}: the environment variable {self.api_key_env} is not set")
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlans:
    """All arms of an experiment."""

    plans: tuple[ArmPlan, ...]
    added: tuple[str, ...]
    """Aggregated shapes that the file does not name."""

    def only(self, names: tuple[str, ...]) -> "ArmPlans":
        """Return some of them, by name, by shape's name, or by the start of either. Raises ExperimentError."""
        for name in names:
            if not any(_is_named(plan, name) for plan in self.plans):
                known = ", ".join(plan.arm.name for plan in self.plans)
                raise ExperimentError(f"there is no arm {name!r}; there are {known}")
        chosen = tuple(plan for plan in self.plans if any(_is_named(plan, name) for name in names))
        return ArmPlans(plans=chosen, added=self.added)


def build_arms(spec: ExperimentSpec, *, path: Path, overrides: Mapping[str, Any] | None = None) -> ArmPlans:
    """Return the arms; `overrides` are keys of serving.yaml for all of them. Raises ExperimentError.

    `path` is the experiment's file, which messages name.
    """
    base, source = inline_or_file(spec.serving, key="serving", path=path)
    shapes, added = with_baselines(spec.shapes)
    settings = tuple(_combinations(spec.grid))
    plans = []
    for shape, chosen in itertools.product(shapes, settings):
        arm = _arm(shape, chosen)
        raw = copy.deepcopy(base)
        raw |= {"name": spec.name[:41], "slo": spec.slo.model_dump()}
        raw.setdefault("launcher", "local")
        changes = {**(overrides or {}), **_shape_keys(shape), **shape.serving, **chosen, "router.port": 0}
        for key, value in changes.items():
            _set(raw, key, value, source=f"{path}: arm {arm.name}")
        plans.append(ArmPlan(arm=arm, serving=_checked(raw, source=f"{source}: arm {arm.name}")))
    plans += [_external(each) for each in spec.external]
    names = [plan.arm.name for plan in plans]
    for name in names:
        if names.count(name) > 1:
            raise ExperimentError(f"{path}:shapes: two arms are called {name}; give one of them another name")
    return ArmPlans(plans=tuple(plans), added=added)


def _combinations(grid: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _arm(shape: Shape, chosen: Mapping[str, Any]) -> Arm:
    # What has one value in all arms is not in their names.
    settings = {key.rpartition(".")[2]: _text(value) for key, value in chosen.items()}
    if len(settings) < len(chosen):
        settings = {key: _text(value) for key, value in chosen.items()}
    name = " ".join([shape.title, *(f"{key}={value}" for key, value in settings.items())])
    if shape.threads is not None:
        settings["threads"] = str(shape.threads)
    return Arm(name=name, num_prefill=shape.num_prefill, num_decode=shape.num_decode, settings=settings)


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
    """Set a key with dots in a nested mapping; `pools.KEY` in both pools. Mutates `raw`."""
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


def _checked(raw: dict[str, Any], *, source: str) -> ServingConfig:
    try:
        return parse_config(raw, source=source)
    except ConfigError as error:
        raise ExperimentError(str(error)) from None


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_named(plan: ArmPlan, name: str) -> bool:
    return plan.arm.name == name or plan.arm.name.startswith(f"{name} ")
