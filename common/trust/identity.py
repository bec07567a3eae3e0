"""Identities of the parties of a cluster, as SPIFFE ids: `spiffe://<cluster>/<role>/<name>` (SPIFFE-ID, section 2)."""

from dataclasses import dataclass
from enum import StrEnum

SCHEME = "spiffe://"


class Role(StrEnum):
    """Kind of a caller; `access` lists the methods of each."""

    CLIENT = "client"
    """Any caller of a door. Its API key identifies the tenant (router/doors/authentication.py)."""
    ROUTER = "router"
    WORKER = "worker"
    CONTROLLER = "controller"
    OPERATOR = "operator"
    """A person or program that may read the cluster's run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One party of one cluster."""

    cluster: str
    role: Role
    name: str
    """Name of the process at the controller, such as `decode-0`."""

    @property
    def uri(self) -> str:
        """The SPIFFE id."""
        return f"{SCHEME}{self.cluster}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """Invert `uri`. Raises ValueError."""
        cluster, role, name = uri.removeprefix(SCHEME).split("/") if uri.startswith(SCHEME) else ("", "", "")
        if not (cluster and name):
            raise ValueError(f"{uri!r} is not an identity of a kvrelay cluster")
        return cls(cluster=cluster, role=Role(role), name=name)

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def server_name(cluster: str, role: Role) -> str:
    """Return the DNS name in the certificate of every server of a role, on any address."""
    return f"{role}.{cluster}{INTERNAL_SUFFIX}"


INTERNAL_SUFFIX = ".kvrelay.internal"
"""Suffix of names that only the authority assigns; a process cannot request one."""
