"""The workers: membership, readiness and cached prefixes.

Membership is level-triggered: every `set_workers` names all workers. Each member has a link that keeps its state, load
and prefix entries current. A removed member gets no new requests; its channel closes with its last one.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from common.clock import Clock
from common.errors import InvalidRequest, WorkerLost
from common.ids import WorkerId
from common.kv_events import KvEvents, decode_events
from common.parity import TextProbes
from common.timing import timing_from_proto
from common.trust.channels import Reach
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import worker_pb2
from router.fleet.booking import Booking, WorkerBooking
from router.fleet.bookings import Bookings
from router.fleet.facts import ModelFacts, WorkerEndpoint, WorkerFacts, check_report, find_mismatch, summarize
from router.fleet.index import PrefixIndex
from router.fleet.link import RetiredMembers, WorkerLink
from router.fleet.lives import LifeTracker
from router.fleet.member import Member, WorkerState
from router.fleet.pool_timing import PoolTiming
from router.fleet.roster import Roster
from router.fleet.worker_client import WorkerClient
from router.placement.answer_pool import AnswerPool
from router.placement.plans import FleetView

logger = logging.getLogger(__name__)

SILENT_HEARTBEATS = 4
"""Heartbeats without a report after which a connection that breaks counts as silent."""
LOSS_SKEW_S = 0.1
"""Longest time between the first call that a worker's end fails and the notice of it here."""


class Fleet:
    """The router's view of all workers. Event loop only. Close with `aclose`."""

    def __init__(
        self,
        *,
        index: PrefixIndex,
        clock: Clock,
        reach: Reach,
        probes: TextProbes | None = None,
        heartbeat_s: float = 0.0,
    ) -> None:
        """`probes` are the router's results for the fixed texts, which workers must match; None to skip the check.

        `heartbeat_s`: longest time between two updates of a worker; 0: they come only when something changes.
        """
        self.heartbeat_s = heartbeat_s
        self._index = index
        self._connect = reach.worker
        self._direct_name = reach.direct_name
        self.issue = reach.issue
        """Signs the tickets by which workers pull from each other."""
        self._probes = probes
        self._clock = clock
        self._members: dict[WorkerId, Member] = {}
        self._links: dict[WorkerId, WorkerLink] = {}
        self.timing = PoolTiming()
        self.bookings = Bookings(
            members=self._members,
            clock=clock,
            has_prefill=lambda: self.roster.num_prefill > 0,
            on_released=self._on_released,
        )
        self._retired = RetiredMembers()
        self.model: ModelFacts | None = None
        """The served model; while no worker is ready, as last known; None before the first one."""
        self.aliases: tuple[str, ...] = ()
        """Further names under which clients ask for it."""
        self.is_without_prefill = False
        """Whether the cluster has no prefill worker, not even one that is down or starts."""
        self.configured_id = ""
        """`model.id`, under which they may ask for it, too."""
        self._roster: Roster | None = None
        self._changed_loads: set[Member] = set()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self.lives = LifeTracker(self._members, self._until_changed, clock)

    @property
    def members(self) -> tuple[Member, ...]:
        """The membership, prefill workers first."""
        return tuple(sorted(self._members.values(), key=lambda m: (m.endpoint.role, m.endpoint.worker_id)))

    @property
    def members_by_id(self) -> Mapping[WorkerId, Member]:
        """The membership by id, in no order."""
        return self._members

    def count_ready(self, role: "worker_pb2.WorkerRole.ValueType | None" = None) -> int:
        """Return how many workers, of one pool or of both, are ready. Any thread."""
        members = list(self._members.values())
        return sum(m.state is WorkerState.READY and role in (None, m.endpoint.role) for m in members)

    def count_draining(self) -> int:
        """Return how many workers are leaving, or kept out because they are slow. Any thread."""
        return sum(member.is_draining for member in list(self._members.values()))

    def states(self) -> list[tuple[str, str, str]]:
        """Return name, role and state of each worker. Any thread."""
        members = list(self._members.values())
        return [(m.endpoint.worker_id, ROLE_NAMES[m.endpoint.role], m.state_name) for m in members]

    def can_answer(self, pool: AnswerPool) -> bool:
        """Whether a worker of a pool is ready."""
        role = worker_pb2.WORKER_ROLE_PREFILL if pool is AnswerPool.PREFILL else worker_pb2.WORKER_ROLE_DECODE
        return self.count_ready(role) > 0

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change that could make a plan possible."""
        self._listeners.append(listener)

    async def wait_for_model(self, *, timeout_s: float, pool: AnswerPool = AnswerPool.DECODE) -> ModelFacts:
        """Return the model once a worker of the pool that answers has described it.

        Raises WorkerLost, and InvalidRequest at once when the cluster has no such pool.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if pool is AnswerPool.PREFILL and self.is_without_prefill:
                        raise InvalidRequest(
                            "cannot embed: prefill workers compute embeddings, and the cluster has none;"
                            " start one with `kvrelay scale prefill=1`"
                        )
                    if self.model is not None and self.model.has_known(pool):
                        return self.model
                    await self._until_changed()
        except TimeoutError:
            raise WorkerLost(f"no {pool.value} worker became ready within {timeout_s:g} s") from None

    # Membership.

    def set_workers(self, endpoints: Sequence[WorkerEndpoint], *, draining: Collection[WorkerId] = ()) -> int:
        """Make these workers the membership and return how many are ready. Idempotent.

        Draining workers get no new requests, and their running ones should move (`is_leaving`).
        """
        wanted = {endpoint.worker_id: endpoint for endpoint in endpoints}
        for worker_id, member in list(self._members.items()):
            if wanted.get(worker_id) != member.endpoint:
                self._retire(worker_id)
        for worker_id, endpoint in wanted.items():
            if worker_id not in self._members:
                logger.info("worker joins", extra={"worker_id": worker_id, "address": endpoint.address})
                client = WorkerClient(endpoint.address, self._connect)
                member = Member(
                    endpoint=endpoint, client=client, direct_name=self._direct_name, changed=self._changed_loads
                )
                self._members[worker_id] = member
                self._roster = None
                self._links[worker_id] = WorkerLink(member, self, clock=self._clock)
                self._links[worker_id].restart()
        for member in self._members.values():
            with self._logging_drain(member):
                member.is_set_to_drain = member.endpoint.worker_id in draining
        self._notify()
        return self.count_ready()

    @contextmanager
    def _logging_drain(self, member: Member) -> Iterator[None]:
        """Log when the block changes whether the member drains."""
        was_draining = member.is_draining
        yield
        if member.is_draining is not was_draining:
            extra = {"worker_id": member.endpoint.worker_id, "num_users": member.num_users}
            logger.info("worker no longer drains" if was_draining else "worker drains", extra=extra)
            self._roster = None

    def has_another(self, member: Member) -> bool:
        """Return whether another ready worker could take the place of this one."""
        return self.roster.has_another(member)

    def is_leaving(self, member: Member) -> bool:
        """Return whether requests should move from a worker: it drains, and another of its pool can take over."""
        return member.is_draining and member.endpoint.worker_id in self.roster.leaving

    async def aclose(self) -> None:
        """Disconnect from every worker; running calls are cancelled."""
        for worker_id in list(self._members):
            self._retire(worker_id)
        await self._retired.aclose()

    def _retire(self, worker_id: WorkerId) -> None:
        member, link = self._members.pop(worker_id), self._links.pop(worker_id)
        self._roster = None
        logger.info("worker leaves", extra={"worker_id": worker_id, "num_users": member.num_users})
        link.stop()
        self._index.drop(worker_id)
        if member.state is WorkerState.READY and member.life is not None:
            self.lives.note_departure(member.life)
        self._retired.add(member, link)

    # Reports of the links.

    def on_described(self, member: Member, facts: WorkerFacts) -> bool:
        """Accept or refuse a worker; a new epoch voids the blocks and bookings of the old one."""
        others = (m.facts for m in self._members.values() if m is not member and m.is_accepted)
        reference = next(others, None)
        why = find_mismatch(facts, endpoint=member.endpoint, reference=reference, probes=self._probes)
        if why is not None:
            if why != member.why:
                logger.error("worker refused: %s", why, extra={"worker_id": member.endpoint.worker_id})
            self._leave(member, WorkerState.REFUSED, why)
            return False
        was_ready = member.state is WorkerState.READY
        if member.facts is not None and member.facts.epoch != facts.epoch:
            self._index.drop(member.endpoint.worker_id)
            self._note_last_ready(member)
        with self._logging_drain(member):
            member.begin_life(facts)
        # After a gap in the updates, the last report stands until the new subscription brings the next one.
        self._enter(member, WorkerState.READY if was_ready else WorkerState.CONNECTING, "")
        return True

    def on_update(self, member: Member, update: worker_pb2.WatchWorkerResponse) -> None:
        """Apply load, events and timing; the first update of a stream makes the worker ready.

        Raises ValueError for an invalid update, and WorkerLost for one that reports the engine overdue, unless no
        other worker could take its place.
        """
        worker_id = member.endpoint.worker_id
        if update.overdue and self.has_another(member):
            error = WorkerLost(f"{worker_id}: an engine step takes far longer than predicted")
            member.client.break_off(error)
            raise error
        events = decode_events(update.kv_events) if update.kv_events else KvEvents()
        timing = timing_from_proto(update.timing) if update.HasField("timing") else None
        check_report(update.load)
        if update.seq == 0 and not events.is_snapshot:
            self._index.drop(worker_id)
        if events:
            self._index.apply(worker_id, events, window=None if member.facts is None else member.facts.window)
        if events.stored:
            member.stored_s = self._clock.monotonic()
        with self._logging_drain(member):
            member.is_leaving = update.leaving
        now_s, is_next = self._clock.monotonic(), update.seq > 0
        member.take_report(update.load, update.accepted_request_ids, now_s=now_s, is_next=is_next)
        if timing is not None:
            self.timing.take(member, timing, self._members.values())
        if member.state is not WorkerState.READY:
            logger.info("worker ready", extra={"worker_id": worker_id, "address": member.endpoint.address})
            self._enter(member, WorkerState.READY, "")
            if member.life is not None:
                self.lives.note_ready(member.life, now_s)
            self.timing.complete([member])
            accepted = [m.facts for m in self._members.values() if m.facts is not None and m.is_accepted]
            model = summarize(accepted, aliases=self.aliases, configured_id=self.configured_id)
            self.model = model.with_pools_of(self.model)
        self._notify()

    def on_lost(self, member: Member, why: str, *, is_silent: bool = False) -> None:
        """Take the worker out of use until it answers again.

        `is_silent`: nothing came from it, which is also so when its process is stopped or the network is cut. A
        connection that breaks several heartbeats after the last report counts as silent, too: the end of a process
        breaks it at once.
        """
        quiet_s = self._clock.monotonic() - member.reported_s
        is_quiet = 0 < SILENT_HEARTBEATS * self.heartbeat_s < quiet_s
        member.is_silent |= is_silent or (is_quiet and member.state is not WorkerState.LOST)
        if member.state is not WorkerState.LOST or member.why != why:
            logger.warning("worker lost: %s", why, extra={"worker_id": member.endpoint.worker_id})
        self._leave(member, WorkerState.LOST, why)

    def on_silent(self, member: Member, silent_s: float) -> None:
        """Take a silent worker out of use, and have its requests planned again, if another can take its place."""
        worker_id = member.endpoint.worker_id
        if self._members.get(worker_id) is not member or not self.has_another(member):
            return
        error = WorkerLost(f"{worker_id} has been silent for {silent_s:.1f} s")
        self.on_lost(member, error.message, is_silent=True)
        member.client.break_off(error)
        self._links[worker_id].restart()

    def _leave(self, member: Member, state: WorkerState, why: str) -> None:
        self._enter(member, state, why)
        if self._members.get(member.endpoint.worker_id) is member:
            self._index.drop(member.endpoint.worker_id)
        self._notify()

    def _enter(self, member: Member, state: WorkerState, why: str) -> None:
        """Change the state of a member; the only way to do so, because the roster depends on it."""
        if state is not WorkerState.READY:
            self._note_last_ready(member)
        member.state, member.why = state, why
        self._roster = None

    def _note_last_ready(self, member: Member) -> None:
        """Note until when the life of a worker that ceases to be ready has been so."""
        if member.state is WorkerState.READY and member.life is not None:
            now_s = self._clock.monotonic()
            self.lives.note_ready(member.life, member.reported_s if member.is_silent else now_s - LOSS_SKEW_S)

    def suspect(self, booking: WorkerBooking, why: str) -> None:
        """After a failed call, take the worker out of use until it describes itself again; other calls go on."""
        member = booking.member
        worker_id = member.endpoint.worker_id
        if self._members.get(worker_id) is not member or member.state is not WorkerState.READY:
            return
        if member.life == booking.life:
            logger.warning("worker suspected: %s", why, extra={"worker_id": worker_id})
            self._enter(member, WorkerState.CONNECTING, why)
            self._links[worker_id].restart()

    def note_ended(self, booking: WorkerBooking, *, num_failed: int = 0) -> None:
        """Count an attempt on one life of a worker that ended, and whether the worker failed it."""
        if booking.member.life == booking.life:
            booking.member.attempts.note(now_s=self._clock.monotonic(), num_failed=num_failed)

    # Placement.

    @property
    def roster(self) -> Roster:
        """The ready workers by pool, with their loads now."""
        if self._roster is None:
            self._roster = Roster.of(self._members.values())
        elif self._changed_loads:
            self._roster.refresh(self._changed_loads)
        self._changed_loads.clear()
        return self._roster

    def view(self, pool: AnswerPool, *, excluded: Collection[WorkerId]) -> FleetView:
        """Return the ready workers that are not excluded, for a request that a pool answers."""
        block_bytes = 0 if self.model is None else self.model.block_bytes
        return self.roster.view(pool, excluded=excluded, block_bytes=block_bytes)

    def load_version(self, worker_id: WorkerId) -> int:
        """Return a number that changes with the worker's reported load."""
        member = self._members.get(worker_id)
        return -1 if member is None else member.load_version

    def _on_released(self, booking: Booking) -> None:
        for part in booking.on_workers:
            self._retired.close_unused(part.member)
        self._notify()

    async def _until_changed(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()
