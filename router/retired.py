"""Workers that have left the membership: their channels close with their last request."""

import asyncio

from router.link import WorkerLink
from router.member import Member


class RetiredMembers:
    """Removed members on which requests may still run. Event loop only. Close with `aclose`."""

    def __init__(self) -> None:
        self._links: dict[Member, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, member: Member, link: WorkerLink) -> None:
        """Take over a removed member, whose link has been told to stop."""
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
