"""From two configurations to what the step between them needs. Pure: no clock, no files, no processes.

Every key of serving.yaml has an entry in `NEEDS`: a key without one would be taken over by nobody, in silence. A test
holds the table and the configuration's schema together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from cluster.processes.plan import ProcessRole
from common.config import PlannerConfig, ServingConfig, TlsConfig


class Need(StrEnum):
    """What a changed key needs while the cluster serves; the value says it in words."""

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
    # With dtype: auto it decides the dtype.
    "model.device": Need.GENERATION,
    "model.quantization": Need.GENERATION,
    "model.kv_dtype": Need.GENERATION,
    "model.kernels": Need.WORKERS,
    "model.local_files_only": Need.NOTHING,
    # An answer that is longer than a new worker takes could not move there.
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
    Need.WORKERS: (ProcessRole.PREFILL, ProcessRole.DECODE),
}
_PORTS = ("port", "http_port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that differs."""

    key: str
    """Dotted, as in messages of the configuration."""
    before: object
    after: object

    @property
    def need(self) -> Need:
        """What it needs."""
        return NEEDS[self.key]

    @property
    def is_refused(self) -> bool:
        """Whether it cannot be made while the cluster runs."""
        return self.need is Need.RESTART

    def __str__(self) -> str:
        """Return the change and its need in words, without a secret."""
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
    return tuple(role for role in (ProcessRole.PREFILL, ProcessRole.DECODE) if role in wanted)


def needs_routers(changes: Sequence[Change]) -> bool:
    """Return whether the routers have to be new."""
    return any(change.need in (Need.ROUTERS, Need.GENERATION) for change in changes)


def is_new_generation(changes: Sequence[Change]) -> bool:
    """Return whether old and new workers could not exchange KV, or answers."""
    return any(change.need is Need.GENERATION for change in changes)


def keep_free_ports(before: ServingConfig, after: ServingConfig) -> ServingConfig:
    """Return the new configuration with the running ports where it says 0, "any free one"."""
    kept = {name: getattr(before.router, name) for name in _PORTS if getattr(after.router, name) == 0}
    return after.model_copy(update={"router": after.router.model_copy(update=kept)})


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key below a section with its value; the tenants are one."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_yaml(value: object) -> str:
    """Return a value of the configuration as a file has it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)
