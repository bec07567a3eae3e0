"""Alarms when routing by prefixes stops working, or tiers do; each names the problem and what to do.

Problems that show nowhere else:

- `predicted_hits`: the index promises tokens that workers do not find, over the latest decisions with a promise.
- `no_kv_events`: a worker computes prompts but never reports a stored block.
- `no_updates`: a worker reported that it is busy and has been silent since.
- `slow_worker`: a worker's steps take several times as long as those of its pool. It is given less work, by its own
  timing model, and its controller drains it when it stays slow; something is wrong with its host.
- `tier`: a worker says that its tiers cannot be used, or take no more blocks.

Alarms are raised and cleared with hysteresis, so that they do not flap; each change is logged once.
"""

import asyncio
import enum
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.block_hash import num_usable_blocks
from common.clock import Clock
from common.ids import Epoch, WorkerId
from common.timing import SMALL_BATCH, SMALL_CHUNK, TYPICAL_BATCH, TYPICAL_CHUNK, StepShape
from kvrelay.v1 import worker_pb2
from router.fleet.decisions import DecisionRecord
from router.fleet.member import Member, WorkerState

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
WINDOW_DECISIONS = 200
MIN_DECISIONS = 20
"""Decisions with a promise that are needed for a verdict."""
RAISE_BELOW = 0.7
CLEAR_ABOVE = 0.85
"""Shares of the promised tokens that are found."""
NUM_WORST = 3
MIN_UNREPORTED = 3
"""Prompts with new blocks that a worker may leave unreported."""
SILENCE_S = 10.0
RAISE_SLOW, CLEAR_SLOW = 3.0, 2.0
"""Multiples of the step time of the other workers of a pool at which a worker becomes slow, and no longer is."""


class AlarmKind(enum.Enum):
    """The problem that an alarm names."""

    PREDICTED_HITS = "predicted_hits"
    NO_KV_EVENTS = "no_kv_events"
    NO_UPDATES = "no_updates"
    SLOW_WORKER = "slow_worker"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class _Promise:
    worker_id: WorkerId
    num_predicted: int
    num_found: int
    """Tokens that were found, at most `num_predicted`: further ones do not make up for other promises."""


class PromiseWatch:
    """Compares predicted with found tokens over a window of decisions."""

    def __init__(self) -> None:
        self._window: deque[_Promise] = deque(maxlen=WINDOW_DECISIONS)
        self._is_raised = False

    def note(self, decision: DecisionRecord) -> None:
        """Count a decision whose worker has reported what it found."""
        predicted, found = decision.plan.predicted_cached_tokens, decision.num_cached_tokens
        if found is not None and predicted > 0:
            found = max(0, min(found, predicted))
            self._window.append(_Promise(decision.plan.computes, num_predicted=predicted, num_found=found))

    def check(self) -> str | None:
        """Return the text of the alarm, or None."""
        if len(self._window) < MIN_DECISIONS:
            self._is_raised = False
            return None
        predicted: Counter[WorkerId] = Counter()
        found: Counter[WorkerId] = Counter()
        for promise in self._window:
            predicted[promise.worker_id] += promise.num_predicted
            found[promise.worker_id] += promise.num_found
        share = found.total() / predicted.total()
        self._is_raised = share < (CLEAR_ABOVE if self._is_raised else RAISE_BELOW)
        if not self._is_raised:
            return None
        shares = sorted((found[worker_id] / predicted[worker_id], worker_id) for worker_id in predicted)
        worst = ", ".join(f"{worker_id} {worker_share:.0%}" for worker_share, worker_id in shares[:NUM_WORST])
        return (
            f"of the cached tokens promised by the last {len(self._window)} decisions, {share:.0%} were found"
            f" (worst: {worst}); prefixes leave the caches before they are used, or the index is stale:"
            " see `kvrelay explain`, then give the workers more pages or restart the worst"
        )


@dataclass(slots=True)
class _Unreported:
    """Prompts that one life of a worker has computed since its last report of a stored block."""

    epoch: Epoch
    since_s: float
    num_prompts: int


class EventWatch:
    """Finds workers that compute prompts without reporting any new block."""

    def __init__(self) -> None:
        self._unreported: dict[WorkerId, _Unreported] = {}

    def note(self, decision: DecisionRecord, member: Member | None, *, block_size: int) -> None:
        """Count a decision that led to a first token."""
        found = decision.num_cached_tokens
        if member is None or member.facts is None or found is None or decision.ttft_s is None:
            return
        worker_id = member.endpoint.worker_id
        # A cached prompt of exactly k blocks finds k - 1 and stores nothing new.
        num_findable = min(decision.num_hashed_blocks, num_usable_blocks(decision.num_tokens, block_size))
        num_known = max(found // block_size, decision.num_held_blocks)  # those without their window are not found
        if num_findable <= num_known or member.stored_s >= decision.decided_s:
            return
        unreported = self._unreported.get(worker_id)
        if unreported is None or unreported.epoch != member.facts.epoch or unreported.since_s <= member.stored_s:
            unreported = self._unreported[worker_id] = _Unreported(member.facts.epoch, decision.decided_s, 0)
        unreported.num_prompts += 1

    def check(self, members: Mapping[WorkerId, Member], *, now_s: float) -> str | None:
        """Return the text of the alarm, or None."""
        for worker_id, unreported in list(self._unreported.items()):
            member = members.get(worker_id)
            is_same_life = member is not None and member.facts is not None and member.facts.epoch == unreported.epoch
            if member is None or not is_same_life or member.stored_s > unreported.since_s:
                del self._unreported[worker_id]
        silent = [
            f"{worker_id} ({unreported.num_prompts} prompts in {now_s - unreported.since_s:.0f} s)"
            for worker_id, unreported in sorted(self._unreported.items())
            if unreported.num_prompts >= MIN_UNREPORTED and now_s - unreported.since_s >= SILENCE_S
        ]
        if not silent:
            return None
        return (
            f"computed prompts but reported no stored block: {', '.join(silent)}; nothing finds what they cache:"
            " read their logs, then restart them"
        )


def find_silent(members: Iterable[Member], *, now_s: float) -> str | None:
    """Return the text about workers that were busy at their last report and silent for long since; None without any."""
    silent = [
        f"{member.endpoint.worker_id} ({now_s - member.reported_s:.0f} s)"
        for member in members
        if member.state is WorkerState.READY and member.report.num_running and now_s - member.reported_s >= SILENCE_S
    ]
    if not silent:
        return None
    return (
        f"busy but silent: {', '.join(silent)}; a very long step or a hanging update stream makes their load and caches"
        " unknown: read their logs, then restart them"
    )


def find_tier_alarms(members: Iterable[Member]) -> str | None:
    """Return what workers say of their tiers, the same text once; None when all is well."""
    by_text: dict[str, list[WorkerId]] = {}
    for member in members:
        for text in member.report.tier_alarms if member.state is WorkerState.READY else ():
            by_text.setdefault(text, []).append(member.endpoint.worker_id)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items()) or None


class PaceWatch:
    """Finds workers whose steps take several times as long as those of the other workers of their pool.

    A slow host is slow in every step, so a worker counts as slow only as far as its model says so of small steps and of
    typical ones: either may be larger, or smaller, than all that it has measured.
    """

    def __init__(self) -> None:
        self.slowness: Mapping[WorkerId, float] = {}
        """Step time of each ready worker that has measured it, as a multiple of that of the others in its pool."""
        self.slow: Mapping[WorkerId, float] = {}
        """How many times slower than their pool the slow workers are. Any thread."""

    def check(self, members: Iterable[Member]) -> str | None:
        """Compare all workers; returns the text of the alarm, or None."""
        pools: dict[tuple[int, StepShape], list[tuple[float, WorkerId]]] = {}
        for member in members:
            for shape, step_s in _steps_s(member) if member.state is WorkerState.READY else ():
                pools.setdefault((member.endpoint.role, shape), []).append((step_s, member.endpoint.worker_id))
        slowness: dict[WorkerId, float] = {}
        for pool in pools.values():
            pool.sort()
            for place, (step_s, worker_id) in enumerate(pool):
                # The median of the others, the lower one of two; alone in its pool, a worker is compared with itself.
                middle = (len(pool) - 2) // 2
                others_s = pool[middle + (middle >= place)][0] if len(pool) > 1 else step_s
                slowness[worker_id] = min(step_s / others_s, slowness.get(worker_id, math.inf))
        self.slowness = slowness
        self.slow = {
            worker_id: times
            for worker_id, times in slowness.items()
            if times >= (CLEAR_SLOW if worker_id in self.slow else RAISE_SLOW)
        }
        if not self.slow:
            return None
        slow = ", ".join(f"{worker_id} ({times:.1f} times)" for worker_id, times in sorted(self.slow.items()))
        return (
            f"steps take much longer than those of the pool's other workers: {slow}; they get less work, and none when"
            " they stay slow: look for other load, heat or swapping on their hosts"
        )


def _steps_s(member: Member) -> list[tuple[StepShape, float]]:
    """Return the times of small and typical steps of a worker, as it has measured itself; none before."""
    timing = member.reported_timing
    if timing is None:
        return []
    is_prefill = member.endpoint.role == worker_pb2.WORKER_ROLE_PREFILL
    model = timing.prefill if is_prefill else timing.decode
    shapes = (SMALL_CHUNK, TYPICAL_CHUNK) if is_prefill else (SMALL_BATCH, TYPICAL_BATCH)
    return [(shape, model.seconds(shape)) for shape in shapes] if model.is_measured else []


class Alarms:
    """All alarms of one router. Event loop only; `is_raised` from any thread."""

    def __init__(
        self, *, members: Callable[[], Mapping[WorkerId, Member]], block_size: Callable[[], int], clock: Clock
    ) -> None:
        """`members` and `block_size` return the present state of the workers."""
        self._members = members
        self._block_size = block_size
        self._clock = clock
        self._promises = PromiseWatch()
        self._events = EventWatch()
        self.pace = PaceWatch()
        self._raised: dict[AlarmKind, str] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of the raised alarms, each after its kind."""
        return tuple(f"{kind.value}: {text}" for kind, text in self._raised.items())

    def is_raised(self, kind: AlarmKind) -> bool:
        """Whether an alarm is raised. Any thread."""
        return kind in self._raised

    def note(self, decision: DecisionRecord) -> None:
        """Count a decision whose attempt has ended."""
        self._promises.note(decision)
        member = self._members().get(decision.plan.computes)
        self._events.note(decision, member, block_size=max(1, self._block_size()))

    def check(self) -> None:
        """Raise and clear alarms by the present state."""
        members, now_s = self._members(), self._clock.monotonic()
        found = {
            AlarmKind.PREDICTED_HITS: self._promises.check(),
            AlarmKind.NO_KV_EVENTS: self._events.check(members, now_s=now_s),
            AlarmKind.NO_UPDATES: find_silent(members.values(), now_s=now_s),
            AlarmKind.SLOW_WORKER: self.pace.check(members.values()),
            AlarmKind.TIER: find_tier_alarms(members.values()),
        }
        for kind, text in found.items():
            if text is not None and kind not in self._raised:
                logger.warning("alarm %s: %s", kind.value, text)
            elif text is None and kind in self._raised:
                logger.info("alarm %s is over", kind.value)
        self._raised = {kind: text for kind, text in found.items() if text is not None}

    async def watch(self) -> None:
        """Check repeatedly until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()
