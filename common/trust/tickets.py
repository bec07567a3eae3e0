"""Tickets: the temporary right of one worker to pull certain KV from another one.

A router signs one for each handoff and each prefix pull of a request that it has placed; the controller signs them for
moving whole caches between workers. The serving worker checks signer, puller and subject. Workers cannot sign tickets,
so a worker on its own gets nothing from its peers.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import AccessDenied, Unauthenticated
from common.ids import Epoch, HandoffId, WorkerId
from common.trust.identity import Identity, Role
from common.trust.proofs import ProofVerifier, Signer

_AUDIENCE = "kv"
LIFETIME_S = 300.0
"""Longest time from placement to the start of a pull; a started pull continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRight:
    """Right that a ticket grants."""

    puller: WorkerId
    source: WorkerId
    epoch: Epoch
    """Epoch of the source."""
    subject: str
    """KV that may be pulled: `of_handoff`, `of_blocks` or `ANY_CACHED`."""
    tenant: str = ""
    """Tenant of the request, for logs."""


ANY_CACHED = "*"
"""Every cached block of the source. Only the controller may sign this."""

IssueTicket = Callable[[PullRight], str]
"""Returns the ticket for a right."""


def of_handoff(handoff_id: HandoffId) -> str:
    """Return the subject of a ticket for a handoff."""
    return f"handoff:{handoff_id}"


def of_blocks(packed_hashes: bytes) -> str:
    """Return the subject of a ticket for exactly these blocks, in this order, by their packed hashes."""
    return f"blocks:{hashlib.sha256(packed_hashes).hexdigest()}"


def issuer(signer: Callable[[], Signer]) -> IssueTicket:
    """Return a function that signs tickets as this process, with its newest key."""

    def issue(right: PullRight) -> str:
        claims = {
            "puller": right.puller,
            "source": right.source,
            "epoch": str(right.epoch),  # 63 bits: JSON numbers are not exact above 53
            "subject": right.subject,
            "tenant": right.tenant,
        }
        return signer().sign(claims, audience=_AUDIENCE, lifetime_s=LIFETIME_S)

    return issue


def check_ticket(ticket: str, right: PullRight, *, caller: Identity, verifier: ProofVerifier) -> None:
    """Check that a ticket grants a caller that right, ignoring `right.tenant`. Raises AccessDenied."""
    try:
        signer, claims = verifier.verify(ticket, audience=_AUDIENCE)
    except Unauthenticated as error:
        raise AccessDenied(f"cannot pull: {error.message}", field="open.ticket") from error
    subject = claims.get("subject")
    signers = {Role.CONTROLLER} if subject == ANY_CACHED else {Role.ROUTER}
    if signer.role not in signers:
        raise AccessDenied(f"cannot pull: a {signer.role} cannot sign this ticket", field="open.ticket")
    covers_cache = subject == ANY_CACHED and not right.subject.startswith("handoff:")
    wanted = (right.puller, right.source, str(right.epoch))
    is_same = (claims.get("puller"), claims.get("source"), claims.get("epoch")) == wanted
    is_puller = caller.role is Role.WORKER and caller.name == right.puller
    if not (is_puller and is_same and (covers_cache or subject == right.subject)):
        raise AccessDenied("cannot pull: the ticket is for another pull", field="open.ticket")
