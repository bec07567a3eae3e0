"""The connection to one worker, from its first description to the end of the last request on it.

1. Connect and ask for the worker's facts. A worker that does not fit is refused and asked again later.
2. Subscribe. The first update brings a snapshot of its blocks and makes the worker ready.
3. Follow. A gap in the sequence, another epoch or the end of the stream leads back to 1; a failure also takes the
   worker out of use until it answers again.
4. A worker that leaves the membership is followed no longer; its channel closes with its last request.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from common.clock import Clock
from common.errors import DeadlineExceeded, KvrelayError
from kvrelay.v1 import worker_pb2
from router.fleet.facts import facts_from_proto
from router.fleet.member import Member
from router.fleet.worker_client import Incoming

if TYPE_CHECKING:
    from router.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
SNAPSHOT_TIMEOUT_S = 30.0
"""How long the first update may take, which waits for the running step. Afterwards, silence is watched (silence.py)."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
STABLE_S = 5.0
"""After a connection that lasted this long, the pause before the next one is the shortest again."""


class WorkerLink:
    """Follows one worker until it is stopped, and reports to the fleet. Event loop only."""

    def __init__(self, member: Member, fleet: "Fleet", *, clock: Clock) -> None:
        self._member = member
        self._fleet = fleet
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def restart(self) -> None:
        """Start to follow the worker, or start again at once, so that it must describe itself anew."""
        self.stop()
        self._task = asyncio.create_task(self._run(), name=f"link {self._member.endpoint.worker_id}")

    def stop(self) -> None:
        """Stop following; `wait_stopped` waits for the end of the call."""
        if self._task is not None:
            self._task.cancel()
            self._ending.add(self._task)
            self._task.add_done_callback(self._ending.discard)
            self._task = None

    async def wait_stopped(self) -> None:
        """Wait until a stopped link has ended its call."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            started_s = self._clock.monotonic()
            try:
                await self._session()
            except (KvrelayError, ValueError) as error:
                self._fleet.on_lost(self._member, str(error), is_silent=isinstance(error, DeadlineExceeded))
            except Exception as error:  # top of a task: no message of a worker may end it
                logger.exception("link failed", extra={"worker_id": self._member.endpoint.worker_id})
                self._fleet.on_lost(self._member, f"{type(error).__name__}: {error}")
            if self._clock.monotonic() - started_s >= STABLE_S:
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _session(self) -> None:
        worker_id = self._member.endpoint.worker_id
        facts = facts_from_proto(await self._member.client.describe(timeout_s=DESCRIBE_TIMEOUT_S))
        if not self._fleet.on_described(self._member, facts):
            return
        with self._member.client.watch(heartbeat_s=self._fleet.heartbeat_s) as updates:
            expected_seq = 0
            update = await self._first(updates)
            while update is not None:
                if update.epoch != facts.epoch or update.seq != expected_seq:
                    logger.warning(
                        "update out of order, subscribing again",
                        extra={"worker_id": worker_id, "seq": update.seq, "expected_seq": expected_seq},
                    )
                    return
                self._fleet.on_update(self._member, update)
                expected_seq += 1
                update = await updates.receive()

    async def _first(self, updates: Incoming[worker_pb2.WatchWorkerResponse]) -> worker_pb2.WatchWorkerResponse | None:
        """Return the first update. Raises KvrelayError, DeadlineExceeded when it takes too long."""
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                return await updates.receive()
        except TimeoutError:
            raise DeadlineExceeded(f"no snapshot of its blocks came within {SNAPSHOT_TIMEOUT_S:g} s") from None


class RetiredMembers:
    """Members that have left the membership: their channels close with their last request.

    Event loop only. Close with `aclose`.
    """

    def __init__(self) -> None:
        self._links: dict[Member, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, member: Member, link: WorkerLink) -> None:
        """Take over a removed member, whose link has been stopped."""
        self._links[member] = link
        self.close_unused(member)

    def close_unused(self, member: Member) -> None:
        """Close the channel of a member if it has been removed and no request uses it. Harmless when repeated."""
        if member in self._links and not member.num_users:
            self._close(member)

    async def aclose(self) -> None:
        """Close all channels; running calls are cancelled."""
        for member in list(self._links):
            self._close(member)
        while self._closing:
            await asyncio.wait(self._closing)

    def _close(self, member: Member) -> None:
        link = self._links.pop(member)

        async def close() -> None:
            await link.wait_stopped()
            await member.client.close()

        task = asyncio.create_task(close(), name=f"close {member.endpoint.worker_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
