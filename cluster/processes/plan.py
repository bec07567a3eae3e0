"""From a configuration to the processes that make the cluster. Pure: no clock, no files, no environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.config import PoolConfig, ServingConfig

THREADS_ENV = "KVRELAY_THREADS"
MEMORY_ENV = "KVRELAY_MEMORY_BYTES"
CPUS_ENV = "KVRELAY_NUM_CPUS"
# OMP_NUM_THREADS is what OpenMP reads when torch is loaded; ours is for everything that is sized later.
THREAD_ENVS = ("OMP_NUM_THREADS", THREADS_ENV)


class PlanError(Exception):
    """The machine cannot hold the configured processes; the message names the key."""


class ProcessRole(StrEnum):
    """What a process runs."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class Placement(StrEnum):
    """How the workers of a pool are laid over its hosts, where Ray chooses them."""

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    """Unique in the cluster, stable over restarts; a worker's id. Ends with its number: `decode-0`."""
    role: ProcessRole
    host: str | None
    """Where it listens; None: the address by which other hosts reach its host."""
    port: int
    """0: a free one at each start."""
    num_cpus: float = 0
    """To reserve from Ray."""
    num_gpus: float = 0
    placement: Placement = Placement.PACK
    env: Mapping[str, str] = field(default_factory=dict)
    config: ServingConfig | None = None
    """What it serves by, where that is not the launcher's: during and after a rollout."""

    @property
    def index(self) -> int:
        """Its number among those of its role, from 0."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """What the host that runs every worker offers."""

    cores: int
    gpus: Sequence[str] | None
    """Names for CUDA_VISIBLE_DEVICES to deal out, or None: somebody else deals them, or nobody needs to."""
    memory_bytes: int | None = None
    """Free before any worker runs, to be dealt out in equal parts; None: not measured."""


def make_plan(config: ServingConfig, host: HostResources | None) -> tuple[ProcessSpec, ...]:
    """Return the processes, routers first, then the prefill pool, then the decode pool.

    With `host` None the workers spread over unknown hosts: each takes as many threads as the CPUs it reserves, their
    share of its host's memory, and listens on its own host's address. So do all routers but the first, which stays
    where its configured address is. Raises PlanError.
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
    pools = ((ProcessRole.PREFILL, config.pools.prefill), (ProcessRole.DECODE, config.pools.decode))
    num_workers = sum(pool.count for _, pool in pools)
    devices = _GpuDealer(host.gpus) if host is not None and host.gpus is not None else None
    specs = routers
    for role, pool in pools:
        for idx in range(pool.count):
            env = _thread_env(_num_threads(pool, host, num_workers=num_workers))
            env |= _memory_env(pool, host, num_workers=num_workers)
            env |= dict.fromkeys(config.secret_variables, "")  # these are for routers
            if devices is not None and pool.num_gpus:
                env["CUDA_VISIBLE_DEVICES"] = devices.take(pool.num_gpus, key=f"pools.{role}.num_gpus")
            specs.append(
                ProcessSpec(
                    name=f"{role}-{idx}",
                    role=role,
                    host="127.0.0.1" if host is not None else None,
                    port=0,
                    num_cpus=pool.num_cpus,
                    num_gpus=pool.num_gpus,
                    placement=Placement(pool.placement),
                    env=env,
                )
            )
    return tuple(specs)


def with_sizes(config: ServingConfig, sizes: Mapping[ProcessRole, int]) -> ServingConfig:
    """Return the configuration with other sizes of the named pools."""
    changed = {str(role): getattr(config.pools, role).model_copy(update={"count": n}) for role, n in sizes.items()}
    return config.model_copy(update={"pools": config.pools.model_copy(update=changed)})


def _num_threads(pool: PoolConfig, host: HostResources | None, *, num_workers: int) -> int:
    if pool.threads != "auto":
        return pool.threads
    return _num_reserved_cpus(pool) if host is None else max(1, host.cores // num_workers)


def _thread_env(num_threads: int) -> dict[str, str]:
    return dict.fromkeys(THREAD_ENVS, str(num_threads))


def _memory_env(pool: PoolConfig, host: HostResources | None, *, num_workers: int) -> dict[str, str]:
    if host is None:
        return {CPUS_ENV: str(_num_reserved_cpus(pool))}
    return {} if host.memory_bytes is None else {MEMORY_ENV: str(host.memory_bytes // num_workers)}


def _num_reserved_cpus(pool: PoolConfig) -> int:
    return max(1, int(pool.num_cpus))


class _GpuDealer:
    """Deals devices in order: whole ones exclusively, fractions of one to as many workers as fit."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._used = [0.0] * len(self._gpus)

    def take(self, num_gpus: float, *, key: str) -> str:
        """Return the value for CUDA_VISIBLE_DEVICES. Raises PlanError when the devices run out."""
        if num_gpus != int(num_gpus) and num_gpus > 1:
            raise PlanError(f"{key}: {num_gpus:g} is neither a whole number nor a part of one GPU")
        share = min(num_gpus, 1.0)
        fitting = [idx for idx, used in enumerate(self._used) if used + share <= 1.0 + 1e-9]
        wanted = max(1, int(num_gpus))
        if len(fitting) < wanted:
            raise PlanError(f"{key}: {num_gpus:g} more wanted, but this machine's {len(self._gpus)} GPUs are dealt out")
        for idx in fitting[:wanted]:
            self._used[idx] += share
        return ",".join(self._gpus[idx] for idx in fitting[:wanted])
