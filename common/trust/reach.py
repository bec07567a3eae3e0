"""How a party of the cluster calls the others, as itself."""

from dataclasses import dataclass

from common.rpc import Connect
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role, server_name
from common.trust.tickets import IssueTicket, issuer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What makes channels, and what signs tickets."""

    worker: Connect
    """To a worker's control or KV plane."""
    router: Connect
    """To a router's administration."""
    issue: IssueTicket
    """Good from a router for what it has placed, from the controller for moving caches, from nobody else."""
    direct_name: str = ""
    """DNS name in the certificates of workers' direct doors; empty: they name the hosts, or there is no TLS."""

    @classmethod
    def of(cls, credentials: Credentials, *, has_own_files: bool = False) -> "Reach":
        """Return the reach of the holder of these credentials.

        `has_own_files`: doors show the operator's certificate in place of the cluster's.
        """
        is_issued = credentials.is_encrypted and not has_own_files
        return cls(
            direct_name=server_name(credentials.identity.cluster, Role.WORKER) if is_issued else "",
            worker=connect_to(Role.WORKER, credentials),
            router=connect_to(Role.ROUTER, credentials),
            issue=issuer(lambda: credentials.held.signer),
        )
