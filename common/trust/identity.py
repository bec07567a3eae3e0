"""Names of the parties of a cluster, as SPIFFE ids: `spiffe://<cluster>/<role>/<name>` (SPIFFE-ID, section 2)."""

from dataclasses import dataclass
from enum import StrEnum

SCHEME = "spiffe://"


class Role(StrEnum):
    """What a caller is; the table of `access` says what each may call."""

    CLIENT = "client"
    """Anybody who reaches a door. Which tenant it is, an API key tells (router/doorkeeper.py)."""
    ROUTER = "router"
    WORKER = "worker"
    CONTROLLER = "controller"
    OPERATOR = "operator"
    """A person, or a program of one, that may read the cluster's run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One party of one cluster."""

    cluster: str
    role: Role
    name: str
    """The process, as the controller calls it, such as `decode-0`."""

    @property
    def uri(self) -> str:
        """The SPIFFE id."""
        return f"{SCHEME}{self.cluster}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """Invert `uri`. Raises ValueError."""
        cluster, role, name = uri.removeprefix(SCHEME).split("/") if uri.startswith(SCHEME) else ("", "", "")
        if not (cluster and name):
            raise ValueError(f"{uri!r} is no identity of a kvrelay cluster")
        return cls(cluster=cluster, role=Role(role), name=name)

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def server_name(cluster: str, role: Role) -> str:
    """Return the DNS name that every server of a role has in its certificate, wherever it listens."""
    return f"{role}.{cluster}{INTERNAL_SUFFIX}"


INTERNAL_SUFFIX = ".kvrelay.internal"
"""Of names that only the authority gives out; a process cannot ask for one."""
