"""Workers that have left the membership: their channels close with their last request."""

import asyncio

from common.ids import Epoch, WorkerId
from router.crash_budget import Life
from router.link import WorkerLink
from router.member import Member, WorkerState

_MAX_DEPARTED = 1024


class RetiredMembers:
    """Removed members on which requests may still run. Event loop only. Close with `aclose`."""

    def __init__(self) -> None:
        self._links: dict[Member, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._departed: dict[WorkerId, Epoch] = {}
        """The last lives that were ready when they left."""

    def add(self, member: Member, link: WorkerLink) -> None:
        """Take over a removed member, whose link has been told to stop."""
        self._links[member] = link
        if member.state is WorkerState.READY and member.facts is not None:
            self._departed[member.endpoint.worker_id] = member.facts.epoch
            if len(self._departed) > _MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]
        self.close_unused(member)

    def left_in_order(self, life: Life) -> bool:
        """Return whether a life was ready when its worker left: it had not ended."""
        worker_id, epoch = life
        return self._departed.get(worker_id) == epoch

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
