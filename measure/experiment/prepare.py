"""Turns an experiment's file and a command line into an experiment that is checked and can run."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ServingConfig
from common.model_files import ModelNotFound, resolve_model
from measure.experiment.arms import ArmPlans, build_arms
from measure.experiment.points import Source
from measure.experiment.runner import cell_order
from measure.experiment.spec import ExperimentError, ExperimentSpec, load_experiment
from measure.experiment.store import Cell, Store
from measure.experiment.workloads import Workloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Choices of the command line."""

    source: Source = Source.REAL
    only: tuple[str, ...] = ()
    """Names of arms or shapes; empty: all."""
    loads: tuple[float, ...] = ()
    """Loads in place of the file's; empty: those of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment that can run."""

    spec: ExperimentSpec
    path: Path
    source: Source
    arms: ArmPlans
    workloads: Workloads

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they run."""
        names = [plan.arm.name for plan in self.arms.plans]
        return cell_order(names, self.spec.loads, repeats=self.spec.repeats, order=self.spec.order)

    def claim(self, store: Store) -> None:
        """Claim the folder for this experiment. Raises ExperimentError when it holds results of other settings."""
        changed = store.claim(self.fingerprint())
        if changed:
            raise ExperimentError(
                f"{store.out} holds results of other settings ({', '.join(changed)} differ);"
                " name another folder with --out, or replace them with --again"
            )
        store.keep_file(self.path)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that results depend on, as JSON: more arms, loads or repeats change none."""
        spec = self.spec
        common: dict[str, Any] = {key: getattr(spec, key) for key in ("duration_s", "warm_up_s", "drain_s", "seed")}
        common |= {"slo": spec.slo.model_dump(), "workload": self.workloads.fingerprint}
        if self.source is Source.SIMULATED:
            common["simulate"] = _of_simulation(spec)
        for plan in self.arms.plans:
            common[f"arm {plan.arm.name}"] = (
                {"url": plan.url} if plan.serving is None else plan.serving.model_dump(mode="json")
            )
        return {f"{self.source.value} {key}": value for key, value in common.items()}


def prepare(path: Path, choices: Choices) -> Experiment:
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
    workloads = Workloads(spec, path=path)
    _check_lengths([plan.serving for plan in arms.plans if plan.serving is not None], workloads, source=choices.source)
    return Experiment(spec=spec, path=path, source=choices.source, arms=arms, workloads=workloads)


def _check_lengths(servings: Sequence[ServingConfig], workloads: Workloads, *, source: Source) -> None:
    longest = workloads.longest_tokens()
    for serving in servings:
        limit = serving.model.max_model_len or (_trained_len(serving) if source is Source.REAL else None)
        holds = serving.pools.decode
        if limit is not None and longest > limit:
            reason = f"{serving.model.id} takes {limit}"
        elif holds.num_blocks is not None and longest > holds.num_blocks * holds.block_size:
            reason = f"a decode worker has {holds.num_blocks} pages of {holds.block_size}"
        else:
            continue
        raise ExperimentError(f"workload: its longest session has {longest} tokens, answers included; {reason}")


def _trained_len(serving: ServingConfig) -> int | None:
    """Return the checkpoint's maximum length; None if it is unknown before loading."""
    if serving.model.engine == "fake":
        return None
    try:
        folder = resolve_model(serving.model.id, local_files_only=True)
        length = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (ModelNotFound, OSError, ValueError):
        return None
    return length if isinstance(length, int) else None


def _of_simulation(spec: ExperimentSpec) -> dict[str, Any]:
    simulate = spec.simulate.model_dump(mode="json", exclude={"shapes", "loads", "repeats", "serving"})
    if spec.simulate.timing is not None:
        simulate["timing"] = hashlib.blake2b(spec.simulate.timing.read_bytes(), digest_size=16).hexdigest()
    return simulate
