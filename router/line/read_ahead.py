"""Has workers read the blocks of waiting requests from their tiers, so that these are in pages when their turn comes.

A request that begins to wait is a *candidate* of the worker that will most probably compute it, or be pulled from: the
one that it waits for, or else the one that holds most of it; if that has blocks in tiers only which no other worker has
in pages, and reads them sooner than it computes them. For `MAX_OPEN` candidates of each worker the router has its
blocks read (`ReadAhead`, worker/read_ahead.py). A read stays *open* until it has ended and its request has left the
line, so that what is read ahead is what comes next, and the next candidate follows.

A worker reads only while it has pages for the whole prompts that are open: others would soon take those it filled. The
next candidate waits until its blocks fit, too.
The tenant with the fewest open reads for its weight goes next (fair_queue.py), within a tenant the first in line. One
whose candidate finds no place gets that of a tenant which has more than its part. A read whose request leaves without a
plan is charged to its tenant's share like time of the router.

A read that fails changes nothing: the request reads, pulls or computes its blocks when its turn comes.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from common.clock import Clock
from common.errors import KvrelayError
from common.ids import WorkerId
from router.choosing.offloaded import OffloadedBlocks, find_offloaded
from router.fleet.booking import Booking
from router.fleet.index import PrefixIndex
from router.fleet.member import Member
from router.line.admission import Admission
from router.line.fair_queue import FairQueue
from router.line.tenant_queue import Place
from router.line.wait import Standing, Wait
from router.observe.metrics import RouterMetrics

logger = logging.getLogger(__name__)

MAX_OPEN = 4
"""Most requests that wait here for which one worker reads, or has read."""
_MAX_SHARE = 0.25
"""Most of a worker's pages for the blocks of several open reads; it gives a single tenant no more."""
TIME_LIMIT_S = 10.0
"""Longest read."""
_ANSWER_S = 1.0
"""Time for the worker's answer after that."""


class ReadAheadOutcome(enum.Enum):
    """What became of reads, as counted in metrics."""

    USED = "used"
    """The request's plan has the worker compute its prompt, or pulls from it."""
    ELSEWHERE = "elsewhere"
    """The plan does without this worker."""
    LEFT = "left"
    """The request left the line without a plan."""
    DISPLACED = "displaced"
    """Its place went to another tenant's request."""
    FAILED = "failed"
    """The worker could not be asked."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Candidate(Place):
    """A waiting request, and the blocks that are to be read for it."""

    wait: Wait
    blocks: OffloadedBlocks
    reading: "asyncio.Task[None] | None" = None
    """None before it is open."""
    has_failed: bool = False
    has_left: bool = False
    """Whether its request has a plan, while it is still read for."""


@dataclass(slots=True, eq=False)
class _Reader:
    """Candidates of one worker."""

    waiting: FairQueue[_Candidate] = field(default_factory=FairQueue)
    open: dict[_Candidate, None] = field(default_factory=dict)
    """Those for which it reads or has read, in the order in which they began."""
    num_open: Counter[str] = field(default_factory=Counter)
    """Their number by tenant."""


class LineReadAhead:
    """Reads ahead for the requests in line. Event loop only."""

    def __init__(
        self,
        *,
        index: PrefixIndex,
        members: Mapping[WorkerId, Member],
        admission: Admission,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        """`members`: all workers, as they are at any time."""
        self._index = index
        self._members = members
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._readers: dict[WorkerId, _Reader] = {}
        self._candidates: dict[Wait, _Candidate] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Reads under way; those of requests that have their plan go on."""

    def enter(self, wait: Wait) -> None:
        """Take note of a request that begins to wait."""
        awaited = None if wait.retry is None else wait.retry.awaited
        awaited_id = None if awaited is None else awaited.worker_id
        if isinstance(earlier := wait.read_ahead, _Candidate):  # its worker has refused the plan
            self._candidates[wait] = earlier
            if not earlier.has_left:
                self._open(self._readers.setdefault(earlier.blocks.worker_id, _Reader()), earlier)
            earlier.has_left = False
            return
        if not wait.root:
            return
        blocks = find_offloaded(self._index, self._members, wait.request, awaited=awaited_id)
        if blocks is None:
            return
        candidate = self._candidates[wait] = _Candidate(rank=wait.rank, wait=wait, blocks=blocks)
        reader = self._readers.setdefault(blocks.worker_id, _Reader())
        reader.waiting.add_tenant(wait.tenant, weight=wait.ticket.account.tenant.weight)
        if wait.standing is Standing.FIRST:
            reader.waiting.push_first(candidate)
        else:
            reader.waiting.push(candidate, tenant=wait.tenant)
        if len(reader.open) >= MAX_OPEN:
            self._displace(reader, wait)
        self._fill(blocks.worker_id, reader)

    def leave(self, wait: Wait, booking: Booking | None) -> None:
        """Take note of a request that waits no more, with its plan if it has one."""
        candidate = self._candidates.get(wait)
        if candidate is None:
            return
        outcome = ReadAheadOutcome.LEFT
        if booking is not None:
            plan, worker_id = booking.plan, candidate.blocks.worker_id
            is_used = worker_id == plan.computes or (plan.pull is not None and worker_id == plan.pull.source)
            outcome = ReadAheadOutcome.USED if is_used else ReadAheadOutcome.ELSEWHERE
            if is_used and candidate.reading is not None and not candidate.has_failed:
                num_left = sum(plan.tier_reads.values())
                booking.decision.num_read_ahead_blocks = max(0, candidate.blocks.num_offloaded - num_left)
        self._close(candidate, outcome)

    def _displace(self, reader: _Reader, newcomer: Wait) -> None:
        """Close the latest read of the tenant with most of them for its weight, if the newcomer's has fewer by one."""
        latest = {each.wait.tenant: each for each in reader.open if not each.has_left}

        def part(wait: Wait, num_more: int) -> float:
            return (reader.num_open[wait.tenant] + num_more) / wait.ticket.account.tenant.weight

        other = max(latest.values(), key=lambda each: part(each.wait, 0), default=None)
        if other is not None and part(other.wait, -1) >= part(newcomer, 1):
            self._close(other, ReadAheadOutcome.DISPLACED)

    def _fill(self, worker_id: WorkerId, reader: _Reader) -> None:
        """Begin reads while there are places."""
        while len(reader.open) < MAX_OPEN:
            now_s = self._clock.monotonic()
            candidate = next(reader.waiting.round(now_s=now_s, skipping=(), share=reader.num_open.__getitem__), None)
            if candidate is None:
                break
            if not self._fits(candidate, reader):
                reader.waiting.restore(candidate)
                break
            reader.waiting.charge(candidate.wait.tenant, candidate.blocks.num_offloaded)
            candidate.wait.read_ahead = candidate
            self._open(reader, candidate)
            reading = candidate.reading = asyncio.get_running_loop().create_task(self._read(candidate))
            self._tasks.add(reading)
            reading.add_done_callback(partial(self._end_read, candidate))
        if not reader.open and not len(reader.waiting):
            self._readers.pop(worker_id, None)

    def _open(self, reader: _Reader, candidate: _Candidate) -> None:
        reader.open[candidate] = None
        reader.num_open[candidate.wait.tenant] += 1

    def _end_read(self, candidate: _Candidate, reading: "asyncio.Task[None]") -> None:
        self._tasks.discard(reading)
        if candidate.has_left:
            candidate.has_left = False
            self._free(candidate)

    def _free(self, candidate: _Candidate) -> None:
        """Give the place of an open read to the next one."""
        worker_id = candidate.blocks.worker_id
        reader = self._readers[worker_id]
        if candidate in reader.open:
            del reader.open[candidate]
            reader.num_open[candidate.wait.tenant] -= 1
        self._fill(worker_id, reader)

    def _fits(self, candidate: _Candidate, reader: _Reader) -> bool:
        """Whether its worker has pages for the open prompts and this one, and takes its blocks beside theirs."""
        member, both = self._members.get(candidate.blocks.worker_id), (*reader.open, candidate)
        if member is None or member.facts is None:
            return False
        num_blocks = sum(each.blocks.num_offloaded for each in both)
        has_room = not reader.open or num_blocks <= _MAX_SHARE * member.facts.num_blocks
        return has_room and member.load().num_free_blocks >= sum(each.wait.request.num_prefill_blocks for each in both)

    async def _read(self, candidate: _Candidate) -> None:
        wait, worker_id = candidate.wait, candidate.blocks.worker_id
        member = self._members.get(worker_id)
        if member is None or member.facts is None or not member.may_begin:
            candidate.has_failed = True
            return
        hashes = wait.request.hashes[: candidate.blocks.num_blocks]
        try:
            await member.client.read_ahead(
                hashes, wait.root, member.facts.epoch, time_limit_s=TIME_LIMIT_S, timeout_s=TIME_LIMIT_S + _ANSWER_S
            )
        except KvrelayError as error:
            candidate.has_failed = True
            extra = {"request_id": wait.request.request_id, "worker_id": worker_id}
            logger.info("cannot read ahead: %s", error, extra=extra)

    def _close(self, candidate: _Candidate, outcome: ReadAheadOutcome) -> None:
        del self._candidates[candidate.wait]
        self._readers[candidate.blocks.worker_id].waiting.discard(candidate)
        if candidate.reading is not None:
            if outcome is not ReadAheadOutcome.USED:
                candidate.reading.cancel()
            candidate.has_left = outcome is ReadAheadOutcome.USED and not candidate.reading.done()
            if candidate.has_failed:
                outcome = ReadAheadOutcome.FAILED
            elif outcome is ReadAheadOutcome.LEFT:
                self._admission.charge_reading(candidate.wait.ticket.account, candidate.blocks.read_s)
            self._metrics.count_read_ahead(outcome.value)
        if not candidate.has_left:
            self._free(candidate)
