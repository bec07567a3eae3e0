"""Timing models for workers with too few measurements of their own: those of their pool."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from common.ids import WorkerId
from common.timing import (
    GUESSED_TIMING,
    TYPICAL_BATCH,
    TYPICAL_CHUNK,
    LinkModel,
    StepModel,
    StepShape,
    TimingModel,
    median_model,
)
from kvrelay.v1 import worker_pb2
from router.fleet.member import Member

NUM_LATEST = 15
"""Latest models of a pool, whose median is used."""

TOLERANCE = 0.02
"""Relative change of a median below which the workers keep the model that they have: every worker reports its model
again and again, and a change concerns all of its pool."""

PACE_FACTOR = 3.0
"""Multiple of the gap of a lone answer that replaces an objective which is shorter than this gap."""

_TRANSFER_BYTES = 64 << 20
_Kind = tuple[int, str]
"""Role, and "prefill", "decode" or "gap"."""


class PoolTiming:
    """The latest measured models of each pool; completes the model of a worker with the median of its pool.

    The median is the whole model of the worker whose prediction is the median, because medians of single weights would
    describe no worker. Prefill workers never decode and decode workers rarely prefill, so the other pool may have what
    one pool has not measured. Links are similar: decode workers pull every handoff, prefill workers only when a pull
    looks worthwhile.
    """

    def __init__(self) -> None:
        self._latest: dict[_Kind, deque[tuple[WorkerId, StepModel]]] = {}
        self._links: dict[WorkerId, LinkModel] = {}
        """The latest links that any worker measured, oldest first."""
        self._usual: dict[_Kind, StepModel] = {}
        self._usual_link: LinkModel | None = None

    def take(self, member: Member, reported: TimingModel, members: Iterable[Member]) -> None:
        """Take the measured parts of a worker's model and complete it; also all `members` when a median has moved."""
        member.reported_timing = reported
        role, worker_id = member.endpoint.role, member.endpoint.worker_id
        has_moved = False
        for kind, model in (("prefill", reported.prefill), ("decode", reported.decode), ("gap", reported.gap)):
            if model is not None and model.is_measured:
                latest = self._latest.setdefault((role, kind), deque(maxlen=NUM_LATEST))
                for known in [known for known in latest if known[0] == worker_id]:
                    latest.remove(known)
                latest.append((worker_id, model))
                has_moved |= self._move_usual((role, kind), [model for _id, model in latest])
        has_moved |= self._move_usual_link(worker_id, reported.links.get(None))
        self.complete(members if has_moved else (member,))

    def complete(self, members: Iterable[Member]) -> None:
        """Give each worker the best available model: its own, its pool's, the other pool's, its own estimate."""
        link = self._usual_link
        for member in members:
            reported, role = member.reported_timing, member.endpoint.role
            own = GUESSED_TIMING if reported is None else reported
            timing = replace(
                own,
                prefill=own.prefill if own.prefill.is_measured else self._find_usual(role, "prefill") or own.prefill,
                decode=own.decode if own.decode.is_measured else self._find_usual(role, "decode") or own.decode,
                gap=own.gap if own.gap and own.gap.is_measured else self._usual.get((role, "gap")),
                links=own.links or ({} if link is None else {None: link}),
            )
            if timing != member.timing:
                member.take_timing(timing)

    @property
    def gap(self) -> StepModel | None:
        """The gaps between tokens on a typical decode worker; None until some worker has measured enough steps."""
        role = worker_pb2.WORKER_ROLE_DECODE
        return self._usual.get((role, "gap")) or self._usual.get((role, "decode"))

    def tpot_objective_s(self, slo_s: float, *, num_samples: int, num_tokens: int) -> float:
        """Return the objective for the mean gap of a request that should have `slo_s`.

        When its samples would miss that even alone on a typical decode worker, once that is measured, it is PACE_FACTOR
        times their gap alone: with no objective at all, ever more answers would run at once.
        """
        if self.gap is None:
            return slo_s
        alone_s = self.gap.seconds(StepShape(num_decodes=num_samples, num_context_tokens=num_samples * num_tokens))
        return slo_s if alone_s <= slo_s else PACE_FACTOR * alone_s

    def _move_usual(self, kind: _Kind, models: Sequence[StepModel]) -> bool:
        """Make the median of these models the usual one unless it is nearly the same; return whether it was moved."""
        shape = TYPICAL_CHUNK if kind[1] == "prefill" else TYPICAL_BATCH
        median, usual = median_model(models, lambda model: model.seconds(shape)), self._usual.get(kind)
        if usual is not None and _is_near(median.seconds(shape), usual.seconds(shape)):
            return False
        self._usual[kind] = median
        return True

    def _move_usual_link(self, worker_id: WorkerId, link: LinkModel | None) -> bool:
        """Take the link of a worker, None when it knows none any more; return whether the usual one was moved."""
        self._links.pop(worker_id, None)
        if link is not None:
            self._links[worker_id] = link
        if not self._links:
            was_known, self._usual_link = self._usual_link is not None, None
            return was_known
        if len(self._links) > NUM_LATEST:
            del self._links[next(iter(self._links))]
        median = median_model(list(self._links.values()), lambda link: link.seconds(_TRANSFER_BYTES))
        usual = self._usual_link
        if usual is not None and _is_near(median.seconds(_TRANSFER_BYTES), usual.seconds(_TRANSFER_BYTES)):
            return False
        self._usual_link = median
        return True

    def _find_usual(self, role: int, kind: str) -> StepModel | None:
        other = worker_pb2.WORKER_ROLE_PREFILL + worker_pb2.WORKER_ROLE_DECODE - role
        return self._usual.get((role, kind)) or self._usual.get((other, kind))


def _is_near(seconds: float, usual_s: float) -> bool:
    return abs(seconds - usual_s) <= TOLERANCE * usual_s
