"""Routing policies: pure choices over a view of the fleet.

`prefix_affinity` compares every pair of a prefill and a decode worker, and every decode worker by itself, by one cost
in *prefill tokens*, the work of computing one prompt token:

    remote(P, D) = queued(P) + missing(P) + 0.05 * missing(D) + 8 * sequences(D)
    local(D)     = queued(D) + missing(D) + 8 * sequences(D)

Example, 16-token blocks, a prompt of 1000 tokens of which P1 holds 960 and P2 nothing, D idle and empty: through
P1 40 + 50 = 90, through P2 1000 + 50 = 1050. So P1 is chosen until 960 more tokens are queued there than on P2.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from common.errors import Refused
from common.ids import WorkerId
from router.placement.plans import FleetView, Plan, PlanKind, RouteRequest, WorkerLoad

TRANSFER_PRICE = 0.05
"""Moving a token's KV, relative to computing it."""
SEQUENCE_PRICE = 8.0
"""What one more sequence in a decode batch costs those already in it, in prefill tokens."""
RETRY_AFTER_S = 1.0


class Policy(Protocol):
    """Chooses the workers of a request."""

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Return a plan whose workers are in the view, or why there is none now. Does not book."""
        ...


class _Ranking(ABC):
    """Chooses the option of lowest rank; ties go to the workers that were chosen longest ago."""

    def __init__(self, *, local_prefill_max_tokens: int) -> None:
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._turns = _Turns()

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Choose among all workers that can serve the request."""
        options = list(_options(request, fleet, self._local_prefill_max_tokens))
        if not options:
            return _refusal(request, fleet)
        prefill, decode = min(options, key=lambda pair: (self._rank(request, *pair), self._turns.rank(*pair)))
        self._turns.take(prefill, decode)
        return _plan(request, prefill, decode)

    @abstractmethod
    def _rank(self, request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[float, ...]:
        """Return what is to be low."""


class PrefixAffinity(_Ranking):
    """Least cost."""

    def _rank(self, request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[float, ...]:
        batch = SEQUENCE_PRICE * decode.num_sequences
        if prefill is None:
            return (decode.num_pending_prefill_tokens + _missing(request, decode) + batch,)
        queue = prefill.num_pending_prefill_tokens + _missing(request, prefill)
        return (queue + TRANSFER_PRICE * _missing(request, decode) + batch,)


class RoundRobin(_Ranking):
    """Each worker of a pool in turn, whatever it holds."""

    def _rank(self, request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[float, ...]:
        return ()


class LeastLoad(_Ranking):
    """Fewest sequences and fewest queued prefill tokens, whatever the workers hold."""

    def _rank(self, request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[float, ...]:
        return decode.num_sequences, (decode if prefill is None else prefill).num_pending_prefill_tokens


class _Turns:
    """Remembers who was chosen when, to break ties."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[WorkerId, int] = {}

    def rank(self, prefill: WorkerLoad | None, decode: WorkerLoad) -> tuple[int, int]:
        return (self._last.get(decode.worker_id, 0), 0 if prefill is None else self._last.get(prefill.worker_id, 0))

    def take(self, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        self._now += 1
        for worker in (prefill, decode):
            if worker is not None:
                self._last[worker.worker_id] = self._now


def _options(
    request: RouteRequest, fleet: FleetView, local_prefill_max_tokens: int
) -> Iterator[tuple[WorkerLoad | None, WorkerLoad]]:
    """Yield every (prefill, decode) that can serve the request; prefill is None for a local plan.

    A decode worker prefills a short suffix itself. It prefills a long one only when no prefill worker could ever do it.
    """
    can_ever_prefill = fleet.num_prefill > 0 and not (
        fleet.prefill and all(worker.num_blocks < request.num_prefill_blocks for worker in fleet.prefill)
    )
    for decode in fleet.decode:
        if decode.num_free_blocks < request.num_decode_blocks:
            continue
        if not can_ever_prefill or request.missing_tokens(decode.worker_id) <= local_prefill_max_tokens:
            yield None, decode
            continue
        for prefill in fleet.prefill:
            if prefill.num_blocks >= request.num_prefill_blocks:
                yield prefill, decode


def _missing(request: RouteRequest, worker: WorkerLoad) -> int:
    """Return the tokens to compute, where one matching block counts as none: chat templates all begin alike."""
    if request.cached_blocks.get(worker.worker_id, 0) <= 1:
        return request.num_tokens
    return request.missing_tokens(worker.worker_id)


def _plan(request: RouteRequest, prefill: WorkerLoad | None, decode: WorkerLoad) -> Plan:
    computes = decode if prefill is None else prefill
    missing = request.missing_tokens(computes.worker_id)
    queued = computes.num_pending_prefill_tokens
    return Plan(
        kind=PlanKind.LOCAL if prefill is None else PlanKind.REMOTE,
        decode=decode.worker_id,
        prefill=None if prefill is None else prefill.worker_id,
        predicted_cached_tokens=request.cached_tokens(computes.worker_id),
        reason=f"{missing} tokens to compute behind {queued} queued, {decode.num_sequences} sequences decoding",
    )


def _refusal(request: RouteRequest, fleet: FleetView) -> Refused:
    if not fleet.decode:
        reason = "no decode worker is available"
    elif all(worker.num_free_blocks < request.num_decode_blocks for worker in fleet.decode):
        free = max(worker.num_free_blocks for worker in fleet.decode)
        reason = f"no decode worker has {request.num_decode_blocks} free pages; the most is {free}"
    else:
        reason = "no prefill worker is available"
    return Refused(reason=reason, retry_after_s=RETRY_AFTER_S)


_POLICIES: dict[str, type[_Ranking]] = {
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
}


def make_policy(name: str, *, local_prefill_max_tokens: int) -> Policy:
    """Return the policy that serving.yaml names."""
    return _POLICIES[name](local_prefill_max_tokens=local_prefill_max_tokens)
