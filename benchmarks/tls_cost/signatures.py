"""Tickets and proofs: what it takes to sign and to check them, in this process. It is the same in both arms."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.figures import Figures, quantile, times_us
from benchmarks.trust import HOST, PLAIN
from common.ids import Epoch, HandoffId, WorkerId
from common.trust.authority import Authority
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.identity import Identity, Role
from common.trust.proofs import PROOF_LIFETIME_S, audience_of
from common.trust.tickets import PullRight, check_ticket, of_handoff

_ARM = "both"
_CALLER = Identity(cluster=PLAIN.cluster, role=Role.WORKER, name="decode-0")
_RIGHT = PullRight(
    puller=WorkerId("decode-0"),
    source=WorkerId("prefill-0"),
    epoch=Epoch(1),
    subject=of_handoff(HandoffId("ho-0")),
    tenant="tenant",
)


def measure_signatures(figures: Figures, *, num_rounds: int, num_calls: int) -> None:
    """Sign and check as router and workers do."""
    authority = Authority.new(PLAIN)
    signer = Credentials.of(authority, Role.ROUTER, "router-0").held.signer
    verifier = Credentials.of(authority, Role.WORKER, "prefill-0").held.verifier
    issue = Reach.of(Credentials.of(authority, Role.ROUTER, "router-0")).issue
    audience = audience_of(Role.WORKER, f"{HOST}:1")

    def sign() -> str:
        return signer.sign({}, audience=audience, lifetime_s=PROOF_LIFETIME_S)

    for number in range(num_rounds + 1):
        kept = figures if number else Figures()
        proofs, tickets = ([make() for _ in range(num_calls)] for make in (sign, partial(issue, _RIGHT)))
        known = proofs[0]
        _measure(kept, "ticket signed", [partial(issue, _RIGHT)] * num_calls)
        _measure(kept, "proof signed", [sign] * num_calls)
        check = partial(check_ticket, right=_RIGHT, caller=_CALLER, verifier=verifier)
        _measure(kept, "ticket checked", [partial(check, ticket) for ticket in tickets])
        identify = partial(verifier.identify, audience=audience)
        _measure(kept, "proof checked, first call", [partial(identify, proof) for proof in proofs])
        _measure(kept, "proof checked, further calls", [partial(identify, known)] * num_calls)
        others = [Reach.of(Credentials.of(authority, Role.ROUTER, "router-0")) for _ in range(num_calls // 4)]
        first_tickets = [other.issue(_RIGHT) for other in others]
        _measure(kept, "ticket checked, new certificate", [partial(check, ticket) for ticket in first_tickets])


def _measure(figures: Figures, case: str, works: Sequence[Callable[[], object]]) -> None:
    """Add the median time of a call; each is made once, the first one as a warm-up."""
    samples = [times_us(work, num_calls=1)[0] for work in works]
    figures.add("parts", case, _ARM, us=quantile(samples[1:], 0.5))
