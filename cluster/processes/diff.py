"""The difference between two configurations, and what each changed key needs. Pure: no clock, files or processes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.processes.plan import POOLS, ProcessRole
from common.config import NEEDS, Need, ServingConfig, in_yaml, leaves

_SECRET_PARTS = ("api_key", "salt_secret")

_POOL_NEEDS = {
    Need.PREFILL: (ProcessRole.PREFILL,),
    Need.DECODE: (ProcessRole.DECODE,),
    Need.WORKERS: POOLS,
}
_PORTS = ("port", "http_port")

Generation = tuple[object, ...]
"""Values that processes must have in common to exchange KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """One key that differs."""

    key: str
    """Dotted key, as in error messages of the configuration."""
    before: object
    after: object

    @property
    def need(self) -> Need:
        """Steps that the change needs while the cluster serves."""
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


def find_changes(before: ServingConfig, after: ServingConfig) -> tuple[KeyChange, ...]:
    """Return every key that differs, in the order of the file."""
    new = leaves(after)
    return tuple(
        KeyChange(key=key, before=value, after=new[key]) for key, value in leaves(before).items() if new[key] != value
    )


def roles_to_renew(changes: Sequence[KeyChange]) -> tuple[ProcessRole, ...]:
    """Return the pools that need new workers, prefill first."""
    wanted = {role for change in changes for role in _POOL_NEEDS.get(change.need, ())}
    return tuple(role for role in POOLS if role in wanted)


def needs_routers(changes: Sequence[KeyChange]) -> bool:
    """Return whether the routers must be replaced."""
    return any(change.need in (Need.ROUTERS, Need.GENERATION) for change in changes)


def is_new_generation(changes: Sequence[KeyChange]) -> bool:
    """Return whether old and new workers cannot exchange KV or answers."""
    return any(change.need is Need.GENERATION for change in changes)


def generation_of(config: ServingConfig) -> Generation:
    """Return the values that make a generation, each hashable."""
    values = (value for key, value in leaves(config).items() if NEEDS[key] is Need.GENERATION)
    return tuple(
        json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else value for value in values
    )


def keep_free_ports(before: ServingConfig, after: ServingConfig) -> ServingConfig:
    """Return the new configuration with the running ports where it says 0 (any free port)."""
    kept = {name: getattr(before.router, name) for name in _PORTS if getattr(after.router, name) == 0}
    return after.model_copy(update={"router": after.router.model_copy(update=kept)})
