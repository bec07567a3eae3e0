"""Policies that choose in each pool by itself, as nearly all published ones do.

A *selector* scores the workers of one pool; the lowest key wins. A pooled policy has one selector for each stage: the
whole request where there is no prefill pool, else its prefill and its decode. The decode worker is chosen first: when
little of the prompt is missing there, the request needs no prefill worker.
"""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import Refused
from router.placement.plans import Candidate, FleetView, Plan, PlanKind, RouteRequest, WorkerLoad
from router.placement.policies.eligible import find_eligible, make_plan, refuse_without_prefill

NUM_EXPLAINED = 8
"""Scores that a decision keeps of each pool, for `Explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one worker compares with the others of its pool."""

    worker: WorkerLoad
    cost: float
    """What is to be low."""
    then: tuple[float, ...] = ()
    """What is to be low among those of equal cost."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The parts of the cost."""

    @property
    def key(self) -> tuple[float, ...]:
        """What scores are compared by."""
        return (self.cost, *self.then)


Ties = Callable[[Sequence[Score]], Score]
"""Chooses among scores of equal key, given in the order of the view."""


def first(tied: Sequence[Score]) -> Score:
    """Choose the first of the view."""
    return tied[0]


def uniform(rng: random.Random) -> Ties:
    """Return a rule that chooses by lot."""
    return rng.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A chosen worker and those that it was compared with."""

    chosen: Score
    best: tuple[Score, ...]
    """The lowest scores, the chosen one first."""
    num_scored: int


class Selector(ABC):
    """Chooses one worker of a pool."""

    def __init__(self, *, ties: Ties = first) -> None:
        self._ties = ties

    @abstractmethod
    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """Return the scores of those workers, at least one, that are compared."""

    def select(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Selection:
        """Choose among the workers, at least one."""
        scores = self.score(request, workers)
        lowest = min(score.key for score in scores)
        chosen = self._ties([score for score in scores if score.key == lowest])
        others = heapq.nsmallest(NUM_EXPLAINED, (s for s in scores if s is not chosen), key=lambda score: score.key)
        return Selection(chosen=chosen, best=(chosen, *others[: NUM_EXPLAINED - 1]), num_scored=len(scores))

    def note(self, request: RouteRequest, worker: WorkerLoad) -> None:  # noqa: B027
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

    def choose(self, request: RouteRequest, fleet: FleetView) -> Plan | Refused:
        """Choose the decode worker, then the prefill worker unless the former can do without."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        if eligible.must_be_local:
            whole = self._whole.select(request, eligible.decode)
            self._whole.note(request, whole.chosen.worker)
            return _plan_local(request, whole)
        decode = self._decode.select(request, eligible.decode)
        is_local = request.missing_tokens(decode.chosen.worker.worker_id) <= self._local_prefill_max_tokens
        if not is_local and not eligible.prefill:
            return refuse_without_prefill()
        self._decode.note(request, decode.chosen.worker)
        if is_local:
            return _plan_local(request, decode)
        prefill = self._prefill.select(request, eligible.prefill)
        self._prefill.note(request, prefill.chosen.worker)
        return _plan_remote(request, prefill, decode)


def _plan_local(request: RouteRequest, decode: Selection) -> Plan:
    return make_plan(
        request,
        None,
        decode.chosen.worker,
        candidates=lambda: tuple(_candidate(None, score) for score in decode.best),
        num_candidates=decode.num_scored,
    )


def _plan_remote(request: RouteRequest, prefill: Selection, decode: Selection) -> Plan:
    def candidates() -> tuple[Candidate, ...]:
        # The pools are chosen independently, so a pair differs from the chosen one in one worker at a time.
        pairs = [(score, decode.chosen) for score in prefill.best]
        pairs += [(prefill.chosen, score) for score in decode.best[1:]]
        return tuple(_candidate(*pair) for pair in pairs)

    return make_plan(
        request,
        prefill.chosen.worker,
        decode.chosen.worker,
        candidates=candidates,
        num_candidates=prefill.num_scored * decode.num_scored,
    )


def _candidate(prefill: Score | None, decode: Score) -> Candidate:
    if prefill is None:
        return Candidate(
            kind=PlanKind.LOCAL,
            prefill=None,
            decode=decode.worker.worker_id,
            source=None,
            cost=decode.cost,
            terms=decode.terms,
        )
    terms = {f"prefill.{name}": value for name, value in prefill.terms.items()}
    terms |= {f"decode.{name}": value for name, value in decode.terms.items()}
    return Candidate(
        kind=PlanKind.REMOTE,
        prefill=prefill.worker.worker_id,
        decode=decode.worker.worker_id,
        source=None,
        cost=prefill.cost + decode.cost,
        terms=terms,
    )
