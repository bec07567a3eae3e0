"""Policies that choose in each pool separately, as nearly all published ones do.

A *selector* scores the workers of one pool; the lowest key wins. A pooled policy has one selector for each stage: the
whole request where there is no prefill pool, else its prefill and its decode. The decode worker is chosen first: when
few tokens of the prompt are missing there, the request needs no prefill worker.
"""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import Refused
from router.placement.answer_pool import AnswerPool
from router.placement.loads import ProjectedLoad
from router.placement.plans import FleetView, PlacementRequest, Plan, PlanCandidate, PolicyFactory, PolicySettings
from router.placement.policies.eligible import find_eligible, refuse_without

NUM_EXPLAINED = 8
"""Scores that a decision keeps of each pool, for `Explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one worker compares with the others of its pool."""

    worker: ProjectedLoad
    cost: float
    """Cost that the selector minimizes."""
    then: tuple[float, ...] = ()
    """Further costs, minimized among scores of equal cost."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Parts of the cost."""

    @property
    def key(self) -> tuple[float, ...]:
        """The key by which scores are compared."""
        return (self.cost, *self.then)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A chosen worker and those that it was compared with."""

    chosen: Score
    best: tuple[Score, ...]
    """The lowest scores, the chosen one first."""
    num_scored: int

    @property
    def worker(self) -> ProjectedLoad:
        """The chosen worker."""
        return self.chosen.worker


class Selector(ABC):
    """Chooses the worker of the lowest score; ties go to the first of the view, or by lot when there is a generator."""

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng

    @abstractmethod
    def score(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> list[Score]:
        """Return the scores of the workers that are compared, at least one."""

    def select(self, request: PlacementRequest, workers: Sequence[ProjectedLoad]) -> Selection:
        """Choose among the workers, at least one."""
        scores = self.score(request, workers)
        lowest = min(score.key for score in scores)
        tied = [score for score in scores if score.key == lowest]
        chosen = tied[0] if self._rng is None else self._rng.choice(tied)
        others = heapq.nsmallest(NUM_EXPLAINED, (s for s in scores if s is not chosen), key=lambda score: score.key)
        return Selection(chosen=chosen, best=(chosen, *others[: NUM_EXPLAINED - 1]), num_scored=len(scores))

    def note(self, request: PlacementRequest, worker: ProjectedLoad) -> None:  # noqa: B027
        """Remember that a plan was made with the worker. Selectors with a memory override it."""


class PooledPolicy:
    """One selector for each stage."""

    def __init__(
        self, *, whole: Selector, prefill: Selector, decode: Selector, local_prefill_max_tokens: float = 0
    ) -> None:
        self._whole = whole
        self._prefill = prefill
        self._decode = decode
        self._local_prefill_max_tokens = local_prefill_max_tokens

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Choose the decode worker, then a prefill worker unless the decode worker can do without."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        if eligible.must_be_local:
            whole = self._whole.select(request, eligible.decode.loads)
            self._whole.note(request, whole.worker)
            return _plan(request, None, whole)
        decode = self._decode.select(request, eligible.decode.loads)
        is_local = request.missing_tokens(decode.worker.worker_id) <= self._local_prefill_max_tokens
        if not is_local and not eligible.prefill:
            return refuse_without(AnswerPool.PREFILL)
        self._decode.note(request, decode.worker)
        if is_local:
            return _plan(request, None, decode)
        prefill = self._prefill.select(request, eligible.prefill.loads)
        self._prefill.note(request, prefill.worker)
        return _plan(request, prefill, decode)


_MakeSelector = Callable[[random.Random], Selector]


def pooled(
    whole: _MakeSelector,
    prefill: _MakeSelector | None = None,
    decode: _MakeSelector | None = None,
    *,
    threshold: int | None = None,
) -> PolicyFactory:
    """Return the factory of a policy with one selector for each stage, which share a seeded generator.

    A stage that is left out has a selector like that of the whole request. `threshold` replaces the configured limit
    of local prefills.
    """

    def make(settings: PolicySettings) -> PooledPolicy:
        rng = random.Random(settings.seed)
        return PooledPolicy(
            whole=whole(rng),
            prefill=(prefill or whole)(rng),
            decode=(decode or whole)(rng),
            local_prefill_max_tokens=settings.local_prefill_max_tokens if threshold is None else threshold,
        )

    return make


def _plan(request: PlacementRequest, prefill: Selection | None, decode: Selection) -> Plan:
    """Return the plan of the selections; it is local without a prefill worker, and predicts no times."""

    def candidates() -> tuple[PlanCandidate, ...]:
        if prefill is None:
            return tuple(_candidate(None, score) for score in decode.best)
        # The pools are chosen independently, so a pair differs from the chosen one in one worker at a time.
        pairs = [(score, decode.chosen) for score in prefill.best]
        pairs += [(prefill.chosen, score) for score in decode.best[1:]]
        return tuple(_candidate(*pair) for pair in pairs)

    computes = decode.worker if prefill is None else prefill.worker
    missing, queued = request.missing_tokens(computes.worker_id), computes.num_pending_prefill_tokens
    return Plan(
        answering=decode.worker.worker_id,
        prefill=None if prefill is None else prefill.worker.worker_id,
        predicted_cached_tokens=request.cached_tokens(computes.worker_id),
        reason=f"{missing} tokens to compute behind {queued} queued, {decode.worker.num_sequences} sequences decoding",
        candidates=candidates,
        num_candidates=decode.num_scored * (1 if prefill is None else prefill.num_scored),
    )


def _candidate(prefill: Score | None, decode: Score) -> PlanCandidate:
    if prefill is None:
        return PlanCandidate(prefill=None, answering=decode.worker.worker_id, cost=decode.cost, terms=decode.terms)
    terms = {f"prefill.{name}": value for name, value in prefill.terms.items()}
    terms |= {f"decode.{name}": value for name, value in decode.terms.items()}
    return PlanCandidate(
        prefill=prefill.worker.worker_id,
        answering=decode.worker.worker_id,
        cost=prefill.cost + decode.cost,
        terms=terms,
    )
