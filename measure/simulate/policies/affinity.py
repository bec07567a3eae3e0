"""`session_affinity`: all requests of a session go to the same workers, by consistent hashing.

Each pool chooses the worker with the highest hash of (session, worker), so that a worker that joins or leaves moves
only its own share of the sessions (rendezvous hashing; Thaler and Ravishankar, 1998). Load and caches have no say.

Source: session affinity as routers offer it by a header or a cookie (llm-d, SGLang's and vLLM's routers). Adapted: no
header comes with a simulated request; its id names its session.
"""

from collections.abc import Sequence
from hashlib import blake2b

from common.ids import RequestId
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest
from router.placement.policies.pooled import Score, Selector


def id_in_session(request_id: RequestId, session: int) -> RequestId:
    """Return a request's id that names its session."""
    return RequestId(f"{session}/{request_id}")


class SessionAffinity(Selector):
    """The worker of the highest hash."""

    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the negated hashes."""
        session, _, _ = request.request_id.partition("/")
        return [Score(worker=worker, cost=-_hash(session, worker.worker_id)) for worker in workers]


def _hash(session: str, worker_id: str) -> float:
    return float(int.from_bytes(blake2b(f"{session}\0{worker_id}".encode(), digest_size=6).digest()))
