"""Identities in a fuzzed cluster: guards in front of listeners, and how members call each other.

Proofs and tickets are real, of one authority in this process. Their times are the clock's on the wall: virtual time
does not touch them.
"""

from functools import cache
from typing import Any

from common.rpc import Connect
from common.trust.access import Audience
from common.trust.authority import Authority, AuthoritySettings
from common.trust.channels import InsideChannel, Reach
from common.trust.credentials import Credentials
from common.trust.guard import Guard, Screen
from common.trust.identity import Role
from common.trust.proofs import audience_of
from common.trust.tickets import issuer

AUTHORITY = Authority.new(AuthoritySettings(cluster="test", is_encrypted=False, allows_plain_text=True))
PORT = 1
"""Port of every listener; hosts tell them apart."""

DENIED = ("fuzz-denied", "1")
"""Metadata of calls whose handler must not run."""


@cache
def credentials_of(role: Role, name: str) -> Credentials:
    """Return the credentials of a member."""
    return Credentials.of(AUTHORITY, role, name)


def make_guard(credentials: Credentials, audience: Audience, *, screen: Screen | None = None) -> Guard:
    """Return the guard of a listener on the host that has its member's name."""
    guard = Guard(credentials, audience, screen=screen)
    name = credentials.identity.name
    guard._proof_audience = audience_of(credentials.identity.role, f"{name}:{PORT}")  # noqa: SLF001 - as `listen` does
    return guard


class _SimInsideChannel(InsideChannel):
    """A real channel of a member; what it stands on is simulated."""

    def __init__(self, address: str, role: Role, credentials: Credentials, connect: Connect) -> None:
        super().__init__(address, role, credentials)
        self._connect = connect

    def _real(self) -> Any:
        return self._connect(self._address.removeprefix("dns:///"))


def as_member(credentials: Credentials, role: Role, connect: Connect) -> Connect:
    """Return what makes channels to processes of a role, as the holder of these credentials."""
    return lambda address: _SimInsideChannel(address, role, credentials, connect)


def reach_of(credentials: Credentials, connect: Connect) -> Reach:
    """Return the reach of the holder of these credentials."""
    return Reach(
        worker=as_member(credentials, Role.WORKER, connect),
        router=as_member(credentials, Role.ROUTER, connect),
        issue=issuer(lambda: credentials.held.signer),
    )
