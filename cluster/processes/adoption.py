"""Which processes a new supervisor keeps running, when an earlier one has left some. Pure."""

from collections.abc import Callable, Collection, Sequence

from cluster.processes.plan import ProcessRole, ProcessSpec, with_sizes
from cluster.processes.state import ClusterPhase, ClusterState
from common.config import ServingConfig

_POOLS = (ProcessRole.PREFILL, ProcessRole.DECODE)


def wanted_processes(
    config: ServingConfig,
    plan_for: Callable[[ServingConfig], Sequence[ProcessSpec]],
    *,
    found: Collection[str],
    last: ClusterState | None,
) -> list[ProcessSpec]:
    """Return what runs (`found`, by name) and what ran when the state was written `last`, else what is configured.

    Sizes that were asked for since are thus kept, a worker that happened to be away is not forgotten, and nobody is
    there twice. Names that are none of ours are left alone. Raises PlanError.
    """
    configured = plan_for(config)
    recorded = {each.name for each in last.processes} if last is not None else {spec.name for spec in configured}
    names = recorded | set(found)
    numbers = {role: _numbers(names, role) for role in _POOLS}
    specs = plan_for(with_sizes(config, {role: max(of_role, default=-1) + 1 for role, of_role in numbers.items()}))
    return [spec for spec in specs if spec.role is ProcessRole.ROUTER or spec.name in names]


def serves_already(found: Collection[str], last: ClusterState | None) -> bool:
    """Return whether what is there is a cluster that served, and not the beginning of one."""
    return bool(found) and (last is None or last.phase is ClusterPhase.READY)


def is_stopping(last: ClusterState | None) -> bool:
    """Return whether an earlier supervisor died while it stopped the cluster."""
    return last is not None and last.phase in {ClusterPhase.STOPPING, ClusterPhase.FAILED}


def _numbers(names: Collection[str], role: ProcessRole) -> list[int]:
    parts = (name.rpartition("-") for name in names)
    return [int(number) for pool, _, number in parts if pool == role and number.isdecimal()]
