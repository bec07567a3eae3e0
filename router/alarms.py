"""Whether routing by prefixes still works: alarms that name what is wrong, and what to do.

Three things can turn prefix-aware routing into routing by load alone without an error anywhere:

- `predicted_hits`: the index promises tokens that workers do not find. Over the latest decisions that promised some.
- `no_kv_events`: a worker computes prompts, but says of no new block that it has stored it.
- `no_updates`: a worker said that it is busy, and has said nothing since.

An alarm is raised and cleared with hysteresis, so that it does not flap, and each change is logged once.
"""

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.clock import Clock
from common.ids import Epoch, WorkerId
from router.member import Member, WorkerState
from router.placement.decisions import Decision

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
WINDOW_DECISIONS = 200
MIN_DECISIONS = 20
"""Decisions that promised something, before anything is said about promises."""
RAISE_BELOW = 0.7
CLEAR_ABOVE = 0.85
"""Shares of the promised tokens that were found."""
NUM_WORST = 3
MIN_UNHEARD = 3
"""Prompts with new blocks, of which the worker has told nothing."""
SILENCE_S = 10.0


class AlarmKind(enum.Enum):
    """What is wrong."""

    PREDICTED_HITS = "predicted_hits"
    NO_KV_EVENTS = "no_kv_events"
    NO_UPDATES = "no_updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    worker_id: WorkerId
    num_predicted: int
    num_found: int
    """Of the predicted ones: what was found beyond them makes up for nothing."""


class PromiseWatch:
    """Compares predicted with found tokens, over a window of decisions and weighted by tokens."""

    def __init__(self) -> None:
        self._window: deque[_Promise] = deque()
        self._num_predicted = 0
        self._num_found = 0
        self._is_raised = False

    def note(self, decision: Decision) -> None:
        """Take a decision into account whose worker has told what it found."""
        predicted, found = decision.plan.predicted_cached_tokens, decision.num_cached_tokens
        if found is None or predicted <= 0:
            return
        if len(self._window) == WINDOW_DECISIONS:
            self._count(self._window.popleft(), -1)
        promise = _Promise(
            worker_id=decision.plan.computes, num_predicted=predicted, num_found=max(0, min(found, predicted))
        )
        self._window.append(promise)
        self._count(promise, 1)

    def check(self) -> str | None:
        """Return what is wrong, or None."""
        if len(self._window) < MIN_DECISIONS:
            self._is_raised = False
        else:
            share = self._num_found / self._num_predicted
            self._is_raised = share < (CLEAR_ABOVE if self._is_raised else RAISE_BELOW)
        return self._text() if self._is_raised else None

    def _count(self, promise: _Promise, sign: int) -> None:
        self._num_predicted += sign * promise.num_predicted
        self._num_found += sign * promise.num_found

    def _text(self) -> str:
        share = self._num_found / self._num_predicted
        worst = ", ".join(f"{worker_id} {found:.0%}" for found, worker_id in self._worst())
        return (
            f"of the cached tokens promised by the last {len(self._window)} decisions {share:.0%} were found"
            f" (worst: {worst}); prefixes leave the caches before they are used, or the index is stale:"
            " see `kvrelay explain`, then give the workers more pages or restart the worst"
        )

    def _worst(self) -> list[tuple[float, WorkerId]]:
        totals: dict[WorkerId, tuple[int, int]] = {}
        for promise in self._window:
            found, predicted = totals.get(promise.worker_id, (0, 0))
            totals[promise.worker_id] = found + promise.num_found, predicted + promise.num_predicted
        return sorted((found / predicted, worker_id) for worker_id, (found, predicted) in totals.items())[:NUM_WORST]


@dataclass(slots=True)
class _Unheard:
    """Prompts that one life of a worker has computed since it last told of a stored block."""

    epoch: Epoch
    since_s: float
    num_prompts: int


class EventWatch:
    """Looks for workers that compute prompts, and of whose new blocks no event tells."""

    def __init__(self) -> None:
        self._unheard: dict[WorkerId, _Unheard] = {}

    def note(self, decision: Decision, member: Member | None, *, block_size: int) -> None:
        """Take a decision into account that led to a first token."""
        found = decision.num_cached_tokens
        if member is None or member.facts is None or found is None or decision.ttft_s is None:
            return
        worker_id = member.endpoint.worker_id
        if decision.num_hashed_blocks <= found // block_size or member.stored_s >= decision.decided_s:
            return
        unheard = self._unheard.get(worker_id)
        if unheard is None or unheard.epoch != member.facts.epoch or unheard.since_s <= member.stored_s:
            unheard = self._unheard[worker_id] = _Unheard(member.facts.epoch, decision.decided_s, 0)
        unheard.num_prompts += 1

    def check(self, members: Mapping[WorkerId, Member], *, now_s: float) -> str | None:
        """Return what is wrong, or None."""
        for worker_id, unheard in list(self._unheard.items()):
            member = members.get(worker_id)
            is_same_life = member is not None and member.facts is not None and member.facts.epoch == unheard.epoch
            if member is None or not is_same_life or member.stored_s > unheard.since_s:
                del self._unheard[worker_id]
        silent = [
            f"{worker_id} ({unheard.num_prompts} prompts in {now_s - unheard.since_s:.0f} s)"
            for worker_id, unheard in sorted(self._unheard.items())
            if unheard.num_prompts >= MIN_UNHEARD and now_s - unheard.since_s >= SILENCE_S
        ]
        if not silent:
            return None
        return (
            f"computed prompts, but told of no stored block: {', '.join(silent)}; what they cache is not found"
            " by others: look into their logs, and restart them"
        )


def find_silent(members: Iterable[Member], *, now_s: float) -> str | None:
    """Return which workers were busy when last heard of, and have said nothing for long; None without any."""
    silent = [
        f"{member.endpoint.worker_id} ({now_s - member.reported_s:.0f} s)"
        for member in members
        if member.state is WorkerState.READY and member.report.num_running and now_s - member.reported_s >= SILENCE_S
    ]
    if not silent:
        return None
    return (
        f"busy, but silent: {', '.join(silent)}; a step that takes so long, or an update stream that hangs, makes"
        " their load and caches unknown: look into their logs, and restart them"
    )


class Alarms:
    """All alarms of one router. Event loop only; `is_raised` from any thread."""

    def __init__(
        self, *, members: Callable[[], Mapping[WorkerId, Member]], block_size: Callable[[], int], clock: Clock
    ) -> None:
        """`members` and `block_size` tell of the workers as they are now."""
        self._members = members
        self._block_size = block_size
        self._clock = clock
        self._promises = PromiseWatch()
        self._events = EventWatch()
        self._raised: dict[AlarmKind, str] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """What is wrong, each with its kind in front; none when all is well."""
        return tuple(f"{kind.value}: {text}" for kind, text in self._raised.items())

    def is_raised(self, kind: AlarmKind) -> bool:
        """Whether an alarm stands."""
        return kind in self._raised

    def note(self, decision: Decision) -> None:
        """Learn from a decision whose attempt has ended."""
        self._promises.note(decision)
        member = self._members().get(decision.plan.computes)
        self._events.note(decision, member, block_size=max(1, self._block_size()))

    def check(self) -> None:
        """Raise and clear what has changed."""
        members, now_s = self._members(), self._clock.monotonic()
        found = {
            AlarmKind.PREDICTED_HITS: self._promises.check(),
            AlarmKind.NO_KV_EVENTS: self._events.check(members, now_s=now_s),
            AlarmKind.NO_UPDATES: find_silent(members.values(), now_s=now_s),
        }
        for kind, text in found.items():
            if text is not None and kind not in self._raised:
                logger.warning("alarm %s: %s", kind.value, text)
            elif text is None and kind in self._raised:
                logger.info("alarm %s is over", kind.value)
        self._raised = {kind: text for kind, text in found.items() if text is not None}

    async def watch(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()
