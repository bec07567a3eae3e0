"""`prefix_affinity`: every pair of a prefill and a decode worker, and every decode worker by itself, at one cost.

The cost is in *prefill tokens*, the work of computing one prompt token:

    remote(P, D) = queued(P) + missing(P) + 0.05 * missing(D) + 8 * sequences(D)
    local(D)     = queued(D) + missing(D) + 8 * sequences(D)

Example, 16-token blocks, a prompt of 1000 tokens of which P1 holds 960 and P2 nothing, D idle and empty: through
P1 40 + 50 = 90, through P2 1000 + 50 = 1050. So P1 is chosen until 960 more tokens are queued there than on P2.
"""

from collections.abc import Iterator

from common.errors import Refused
from router.placement.plans import FleetView, Plan, RouteRequest, WorkerLoad
from router.placement.policies.eligible import Eligible, find_eligible, make_plan, refuse_without_prefill
from router.placement.policies.turns import Turns

TRANSFER_PRICE = 0.05
"""Moving a token's KV, relative to computing it."""
SEQUENCE_PRICE = 8.0
"""What one more sequence in a decode batch costs those already in it, in prefill tokens."""


class PrefixAffinity:
    """Least cost; ties go to the workers that were chosen longest ago."""

    def __init__(self, *, local_prefill_max_tokens: int) -> None:
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._turns = Turns()

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Choose among all pairs that can serve the request."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        options = list(self._options(request, eligible))
        if not options:
            return refuse_without_prefill()
        prefill, decode = min(options, key=lambda pair: (_cost(request, *pair), *self._last_turns(*pair)))
        chosen = (decode.worker_id,) if prefill is None else (decode.worker_id, prefill.worker_id)
        self._turns.take(*chosen)
        return make_plan(request, prefill, decode)

    def _last_turns(self, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[int, int]:
        turn = self._turns.last_turn
        return turn(decode.worker_id), 0 if prefill is None else turn(prefill.worker_id)

    def _options(self, request: RouteRequest, eligible: Eligible) -> Iterator[tuple[WorkerLoad | None, WorkerLoad]]:
        """Yield every (prefill, decode); prefill is None for a local plan.

        A decode worker prefills a short suffix itself, a long one only when no prefill worker could ever do it.
        """
        for decode in eligible.decode:
            if eligible.must_be_local or request.missing_tokens(decode.worker_id) <= self._local_prefill_max_tokens:
                yield None, decode
            else:
                for prefill in eligible.prefill:
                    yield prefill, decode


def _cost(request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> float:
    batch = SEQUENCE_PRICE * decode.num_sequences
    if prefill is None:
        return decode.num_pending_prefill_tokens + _missing(request, decode) + batch
    queue = prefill.num_pending_prefill_tokens + _missing(request, prefill)
    return queue + TRANSFER_PRICE * _missing(request, decode) + batch


def _missing(request: RouteRequest, worker: WorkerLoad) -> int:
    """Return the tokens to compute, where one matching block counts as none: chat templates all begin alike."""
    if request.cached_blocks.get(worker.worker_id, 0) <= 1:
        return request.num_tokens
    return request.missing_tokens(worker.worker_id)
