"""Authenticated access of one party of the cluster to the others."""

from dataclasses import dataclass

from common.rpc import Connect
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role, server_name
from common.trust.tickets import IssueTicket, issuer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Factories of channels and tickets."""

    worker: Connect
    """Makes a channel to a worker's control or KV plane."""
    router: Connect
    """Makes a channel to a router's administration."""
    issue: IssueTicket
    """Signs tickets; workers accept those of routers for placed requests, and of the controller for moving caches."""
    direct_name: str = ""
    """DNS name in the certificates of workers' direct doors; empty if they name hosts, or without TLS."""

    @classmethod
    def of(cls, credentials: Credentials, *, has_own_files: bool = False) -> "Reach":
        """Return the access of the holder of these credentials.

        `has_own_files`: doors show the operator's certificate instead of the cluster's.
        """
        is_issued = credentials.is_encrypted and not has_own_files
        return cls(
            direct_name=server_name(credentials.identity.cluster, Role.WORKER) if is_issued else "",
            worker=connect_to(Role.WORKER, credentials),
            router=connect_to(Role.ROUTER, credentials),
            issue=issuer(lambda: credentials.held.signer),
        )
