"""How a party of the cluster calls the others, as itself."""

from dataclasses import dataclass

from common.rpc import Connect
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role
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

    @classmethod
    def of(cls, credentials: Credentials) -> "Reach":
        """Return the reach of whoever holds these credentials."""
        return cls(
            worker=connect_to(Role.WORKER, credentials),
            router=connect_to(Role.ROUTER, credentials),
            issue=issuer(lambda: credentials.held.signer),
        )
