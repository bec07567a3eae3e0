"""The difference between two configurations, and what each changed key needs. Pure: no clock, files or processes.

Every key of serving.yaml has an entry in `NEEDS`: a key without one would silently have no effect. A test compares the
table with the configuration's schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from cluster.processes.plan import POOLS, ProcessRole
from common.config import PlannerConfig, ServingConfig, TlsConfig


class Need(StrEnum):
    """What a changed key needs while the cluster serves; the values are for people."""

    NOTHING = "nothing: processes that start later read it"
    COUNT = "more or fewer workers"
    PREFILL = "new prefill workers, one after the other"
    DECODE = "new decode workers, one after the other"
    WORKERS = "new workers of both pools, one after the other"
    ROUTERS = "new routers, one after the other"
    GENERATION = "a second set of workers, then new routers, one after the other; then the old workers go"
    RESTART = "another cluster: it cannot be changed while this one runs"


_SECRET_PARTS = ("api_key", "salt_secret")

_POOL = {
    "count": Need.COUNT,
    "block_size": Need.GENERATION,
    "kv_memory_gib": None,
    "num_blocks": None,
    "max_step_tokens": None,
    "max_running": None,
    "max_waiting": None,
    "threads": None,
    "metrics": None,
    "drain_grace_s": None,
    "ports": None,
    "num_cpus": None,
    "num_gpus": None,
    "placement": None,
}
"""None: new workers of that pool."""

NEEDS: Mapping[str, Need] = {
    "name": Need.RESTART,
    "launcher": Need.RESTART,
    "model.id": Need.GENERATION,
    "model.engine": Need.GENERATION,
    "model.fake_step_ms": Need.WORKERS,
    "model.dtype": Need.GENERATION,
    # Decides the dtype with dtype: auto.
    "model.device": Need.GENERATION,
    "model.quantization": Need.GENERATION,
    "model.kv_dtype": Need.GENERATION,
    "model.kernels": Need.WORKERS,
    "model.local_files_only": Need.NOTHING,
    # An answer longer than a new worker accepts could not move there.
    "model.max_model_len": Need.GENERATION,
    **{f"pools.prefill.{key}": need or Need.PREFILL for key, need in _POOL.items()},
    **{f"pools.decode.{key}": need or Need.DECODE for key, need in _POOL.items()},
    "transfer.transports": Need.WORKERS,
    "transfer.chunk_bytes": Need.WORKERS,
    "transfer.lease_ttl_s": Need.WORKERS,
    "router.count": Need.RESTART,
    "router.host": Need.RESTART,
    "router.port": Need.RESTART,
    "router.http_port": Need.RESTART,
    "router.max_http_connections": Need.ROUTERS,
    "router.metrics_port": Need.RESTART,
    "router.admin_port": Need.RESTART,
    "router.policy": Need.ROUTERS,
    "router.local_prefill_max_tokens": Need.ROUTERS,
    "router.max_prefill_wait_s": Need.ROUTERS,
    "router.max_queued": Need.ROUTERS,
    "router.auth": Need.ROUTERS,
    "router.salt_secret": Need.ROUTERS,
    "router.shed": Need.ROUTERS,
    "router.queue_timeout_s": Need.ROUTERS,
    "router.recovery_timeout_s": Need.ROUTERS,
    "router.max_attempts": Need.ROUTERS,
    "router.decode_streams": Need.ROUTERS,
    "router.default_max_tokens": Need.ROUTERS,
    "router.max_message_mib": Need.ROUTERS,
    "router.token_cache_mib": Need.ROUTERS,
    "router.index_memory_mib": Need.ROUTERS,
    **{f"tls.{key}": Need.RESTART for key in TlsConfig.model_fields},
    "slo.ttft_s": Need.ROUTERS,
    "slo.ttft_tokens": Need.ROUTERS,
    "slo.itl_s": Need.ROUTERS,
    **{f"planner.{key}": Need.RESTART for key in PlannerConfig.model_fields},
    "tenants": Need.ROUTERS,
}

_POOL_NEEDS = {
    Need.PREFILL: (ProcessRole.PREFILL,),
    Need.DECODE: (ProcessRole.DECODE,),
    Need.WORKERS: POOLS,
}
_PORTS = ("port", "http_port")

Generation = tuple[object, ...]
"""Values that processes must have in common to exchange KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that differs."""

    key: str
    """Dotted key, as in error messages of the configuration."""
    before: object
    after: object

    @property
    def need(self) -> Need:
        """What the change needs."""
        return NEEDS[self.key]

    @property
    def is_refused(self) -> bool:
        """Whether it is impossible while the cluster runs."""
        return self.need is Need.RESTART

    def __str__(self) -> str:
        """Return the change and its need for people, without secrets."""
        if self.key == "tenants" or any(part in self.key for part in _SECRET_PARTS):
            return f"{self.key} changes: {self.need}"
        return f"{self.key}: {in_yaml(self.before)} → {in_yaml(self.after)}: {self.need}"


def find_changes(before: ServingConfig, after: ServingConfig) -> tuple[Change, ...]:
    """Return every key that differs, in the order of the file."""
    new = dict(leaves(after))
    return tuple(Change(key=key, before=value, after=new[key]) for key, value in leaves(before) if new[key] != value)


def roles_to_renew(changes: Sequence[Change]) -> tuple[ProcessRole, ...]:
    """Return the pools that need new workers, prefill first."""
    wanted = {role for change in changes for role in _POOL_NEEDS.get(change.need, ())}
    return tuple(role for role in POOLS if role in wanted)


def needs_routers(changes: Sequence[Change]) -> bool:
    """Return whether the routers must be replaced."""
    return any(change.need in (Need.ROUTERS, Need.GENERATION) for change in changes)


def is_new_generation(changes: Sequence[Change]) -> bool:
    """Return whether old and new workers cannot exchange KV or answers."""
    return any(change.need is Need.GENERATION for change in changes)


def generation_of(config: ServingConfig) -> Generation:
    """Return the values that make a generation."""
    return tuple(value for key, value in leaves(config) if NEEDS[key] is Need.GENERATION)


def keep_free_ports(before: ServingConfig, after: ServingConfig) -> ServingConfig:
    """Return the new configuration with the running ports where it says 0 (any free port)."""
    kept = {name: getattr(before.router, name) for name in _PORTS if getattr(after.router, name) == 0}
    return after.model_copy(update={"router": after.router.model_copy(update=kept)})


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key below a section with its value; the list of tenants counts as one value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_yaml(value: object) -> str:
    """Return a value of the configuration as YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)
