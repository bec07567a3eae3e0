"""From a configuration to the processes of the cluster and their names. Pure: no clock, no files, no environment.

A worker is named after the pool that it was started for and keeps its name when its role flips. So a pool may hold
names of the other pool, and a new worker takes the lowest unused number.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from common.config import PoolConfig, ServingConfig

THREADS_ENV = "KVRELAY_THREADS"
MEMORY_ENV = "KVRELAY_MEMORY_BYTES"
CPUS_ENV = "KVRELAY_NUM_CPUS"
GPU_WORKERS_ENV = "KVRELAY_GPU_WORKERS"
# OpenMP reads OMP_NUM_THREADS when torch is loaded; ours is for everything that is sized later.
THREAD_ENVS = ("OMP_NUM_THREADS", THREADS_ENV)


class PlanError(Exception):
    """The host cannot hold the configured processes; the message names the key."""


class ProcessRole(StrEnum):
    """The service that a process runs."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


POOLS = (ProcessRole.PREFILL, ProcessRole.DECODE)


class Placement(StrEnum):
    """How Ray distributes the workers of a pool over hosts."""

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    """Unique in the cluster and stable over restarts; ends with a number: `decode-0`. A worker's id."""
    role: ProcessRole
    host: str | None
    """Address to listen on; None: the address by which other hosts reach its host."""
    port: int
    """0: a free port at each start."""
    num_cpus: float = 0
    """CPUs to reserve from Ray."""
    num_gpus: float = 0
    placement: Placement = Placement.PACK
    env: Mapping[str, str] = field(default_factory=dict)
    config: ServingConfig | None = None
    """Its own configuration during and after a rollout; None: the launcher's."""

    @property
    def index(self) -> int:
        """Number at the end of its name, from 0."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """Resources of the one host that runs every worker."""

    cores: int
    gpus: Sequence[str] | None
    """Names for CUDA_VISIBLE_DEVICES to assign; None: not assigned here. Workers that reserve none are dealt those that
    no other reserves, in turn."""
    memory_bytes: int | None = None
    """Free memory before any worker runs, divided equally; None: not measured."""


def make_plan(config: ServingConfig, host: HostResources | None) -> tuple[ProcessSpec, ...]:
    """Return the processes, routers first, then the prefill pool, then the decode pool.

    With `host` None the workers run on unknown hosts: each takes as many threads as it reserves CPUs, the same share of
    its host's memory, and listens on its own host's address. So do all routers but the first, which keeps its
    configured address. Raises PlanError.
    """
    routers = [
        ProcessSpec(
            name=f"router-{idx}",
            role=ProcessRole.ROUTER,
            host=config.router.host if host is not None or idx == 0 else None,
            port=config.router.replica(idx).port,
            num_cpus=0,
        )
        for idx in range(config.router.count)
    ]
    num_workers = sum(sizes_of(config).values())
    devices = None
    if host is not None and host.gpus is not None:
        devices = _GpuDealer(host.gpus, shows_others=config.model.engine == "torch")
    specs = routers
    unreserved: list[tuple[dict[str, str], int]] = []
    for role in POOLS:
        pool: PoolConfig = getattr(config.pools, role)
        for idx in range(pool.count):
            env = _worker_env(pool, host, num_workers=num_workers)
            env |= dict.fromkeys(config.secret_variables, "")  # only routers may read these
            if devices is not None and pool.num_gpus:
                env["CUDA_VISIBLE_DEVICES"] = devices.take(pool.num_gpus, key=f"pools.{role}.num_gpus")
            elif config.deals_gpus:
                unreserved.append((env, pool.tensor_parallel))
            specs.append(
                ProcessSpec(
                    name=f"{role}-{idx}",
                    role=role,
                    host="127.0.0.1" if host is not None else None,
                    port=0,
                    num_cpus=pool.num_cpus * pool.tensor_parallel,  # of one actor, so all on one host
                    num_gpus=pool.num_gpus,
                    placement=Placement(pool.placement),
                    env=env,
                )
            )
    if devices is not None:
        devices.deal(unreserved)
    return tuple(specs)


def largest_crowd(specs: Sequence[ProcessSpec]) -> int:
    """Return the most workers that were dealt one GPU."""
    return max((int(spec.env.get(GPU_WORKERS_ENV, 0)) for spec in specs), default=0)


def threads_of_ranks(config: ServingConfig, specs: Sequence[ProcessSpec]) -> int:
    """Return the threads of all workers; 0 where none has several ranks, which wait for each other in every layer."""
    pools = [getattr(config.pools, spec.role) for spec in specs if spec.role in POOLS]
    if all(pool.tensor_parallel == 1 for pool in pools):
        return 0
    return sum(pool.num_threads(auto=1) for pool in pools)


def with_sizes(config: ServingConfig, sizes: Mapping[ProcessRole, int]) -> ServingConfig:
    """Return the configuration with other sizes of the named pools."""
    changed = {str(role): getattr(config.pools, role).model_copy(update={"count": n}) for role, n in sizes.items()}
    return config.model_copy(update={"pools": config.pools.model_copy(update=changed)})


def sizes_of(config: ServingConfig) -> dict[ProcessRole, int]:
    """Return the pool sizes of a configuration."""
    return {role: getattr(config.pools, role).count for role in POOLS}


def pool_order(spec: ProcessSpec) -> tuple[bool, str, int]:
    """Return the sort key of a pool: its own names first, by number. The last workers stop, or flip, first."""
    home, _, _ = spec.name.rpartition("-")
    return home != spec.role, home, spec.index


def with_living_names(
    planned: Sequence[ProcessSpec], living: Mapping[ProcessRole, Sequence[ProcessSpec]]
) -> list[ProcessSpec]:
    """Return the planned workers under the names of the living ones, in order, then under new names.

    The specs planned for one pool differ in their names only.
    """
    taken = {spec.name for pool in living.values() for spec in pool}
    named: list[ProcessSpec] = []
    for role in dict.fromkeys(spec.role for spec in planned):
        wanted = [spec for spec in planned if spec.role is role]
        names = [spec.name for spec in living.get(role, ())][: len(wanted)]
        free = (name for number in range(len(taken) + len(wanted)) if (name := f"{role}-{number}") not in taken)
        names += [next(free) for _ in range(len(wanted) - len(names))]
        named += [replace(spec, name=name) for spec, name in zip(wanted, names, strict=True)]
    return named


def _worker_env(pool: PoolConfig, host: HostResources | None, *, num_workers: int) -> dict[str, str]:
    """Return the environment variables that set a worker's threads, and its memory or CPUs."""
    num_cpus = max(1, int(pool.num_cpus * pool.tensor_parallel))
    num_threads = pool.threads
    if num_threads == "auto":
        num_threads = num_cpus if host is None else max(1, host.cores // num_workers)
    env = dict.fromkeys(THREAD_ENVS, str(num_threads))
    if host is None:
        env[CPUS_ENV] = str(num_cpus)
    elif host.memory_bytes is not None:
        env[MEMORY_ENV] = str(host.memory_bytes // num_workers)
    return env


class _GpuDealer:
    """Assigns devices in order: whole ones exclusively, one shared device to as many workers as fit."""

    def __init__(self, gpus: Sequence[str], *, shows_others: bool) -> None:
        """`shows_others`: see `_visible`."""
        self._gpus = tuple(gpus)
        self._shows_others = shows_others and not any(gpu.startswith("MIG") for gpu in gpus)
        self._used = [0.0] * len(self._gpus)

    def take(self, num_gpus: float, *, key: str) -> str:
        """Return the value for CUDA_VISIBLE_DEVICES. Raises PlanError if too few devices are left."""
        if num_gpus != int(num_gpus) and num_gpus > 1:
            raise PlanError(f"{key}: {num_gpus:g} is neither a whole number nor a part of one GPU")
        share = min(num_gpus, 1.0)
        fitting = [idx for idx, used in enumerate(self._used) if used + share <= 1.0 + 1e-9]
        wanted = max(1, int(num_gpus))
        if len(fitting) < wanted:
            raise PlanError(
                f"{key}: {num_gpus:g} more wanted, but all {len(self._gpus)} GPUs of this host are assigned"
            )
        for idx in fitting[:wanted]:
            self._used[idx] += share
        return self._visible([self._gpus[idx] for idx in fitting[:wanted]])

    def deal(self, workers: Sequence[tuple[dict[str, str], int]]) -> None:
        """Set in each worker's variables devices that no reservation has, and how many workers these have.

        `workers`: variables and ranks of each; a rank gets a device, in turn.
        """
        free = [gpu for gpu, used in zip(self._gpus, self._used, strict=True) if not used]
        if not free:
            return
        turn = itertools.cycle(free)
        dealt = [list(dict.fromkeys(itertools.islice(turn, num_ranks))) for _env, num_ranks in workers]
        num_workers = Counter(itertools.chain.from_iterable(dealt))
        for (env, _num_ranks), own in zip(workers, dealt, strict=True):
            env["CUDA_VISIBLE_DEVICES"] = self._visible(own)
            env[GPU_WORKERS_ENV] = str(max(num_workers[gpu] for gpu in own))

    def _visible(self, own: Sequence[str]) -> str:
        """Return the value for CUDA_VISIBLE_DEVICES of a worker that computes on these.

        Its own come first, so that its device 0 is its own. The others follow, since the driver maps memory of visible
        devices only; slices of a card are never mapped, and a process sees one of them.
        """
        others = [gpu for gpu in self._gpus if gpu not in own] if self._shows_others else []
        return ",".join([*own, *others])
