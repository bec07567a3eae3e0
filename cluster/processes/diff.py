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

_KEYS: Mapping[Need, str] = {
    Need.NOTHING: "model.local_files_only",
    # model.device decides the dtype with dtype: auto; an answer longer than a new max_model_len could not move.
    Need.GENERATION: "model.id model.engine model.dtype model.device model.quantization model.kv_dtype"
    " model.max_model_len",
    Need.WORKERS: "model.fake_step_ms model.kernels transfer.transports transfer.chunk_bytes transfer.lease_ttl_s",
    Need.ROUTERS: "router.max_http_connections router.policy router.local_prefill_max_tokens router.max_prefill_wait_s"
    " router.max_queued router.auth router.salt_secret router.shed router.queue_timeout_s router.recovery_timeout_s"
    " router.max_attempts router.decode_streams router.default_max_tokens router.max_message_mib"
    " router.token_cache_mib router.index_memory_mib slo.ttft_s slo.ttft_tokens slo.itl_s tenants",
    Need.RESTART: "name launcher router.count router.host router.port router.http_port router.metrics_port"
    " router.admin_port",
}
_POOL_KEYS = (
    "kv_memory_gib num_blocks max_step_tokens max_running max_waiting threads metrics drain_grace_s ports num_cpus"
    " num_gpus placement"
)
"""Keys of a pool that need new workers of that pool."""

NEEDS: Mapping[str, Need] = {
    **{key: need for need, keys in _KEYS.items() for key in keys.split()},
    **{f"pools.{role}.count": Need.COUNT for role in POOLS},
    **{f"pools.{role}.block_size": Need.GENERATION for role in POOLS},
    **{f"pools.{role}.{key}": Need[role.name] for role in POOLS for key in _POOL_KEYS.split()},
    **{f"tls.{key}": Need.RESTART for key in TlsConfig.model_fields},
    **{f"planner.{key}": Need.RESTART for key in PlannerConfig.model_fields},
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
