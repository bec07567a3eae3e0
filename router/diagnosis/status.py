"""The state of the cluster as one router reports it."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from common.errors import KvrelayError
from common.timing import timing_to_proto
from common.wire import message_of
from kvrelay.v1 import inference_pb2 as pb
from router.fleet.member import Member, WorkerState
from router.parts import RouterParts


class StatusReporter:
    """Reports what a router holds, and asks its workers what they hold."""

    def __init__(self, parts: RouterParts, *, is_encrypted: bool = False) -> None:
        """`is_encrypted`: whether the router's doors use TLS."""
        self._parts = parts
        self._is_encrypted = is_encrypted
        self.http_port = 0
        """Port of the HTTP door; 0 without one."""

    async def status(self, *, timeout_s: float) -> pb.GetClusterStatusResponse:
        """Return the whole state; a worker that does not answer within `timeout_s` has no status of its own."""
        views = await asyncio.gather(*(self._view(member, timeout_s) for member in self._parts.fleet.members))
        router = self.router()
        pinned: Counter[str] = Counter()
        for view in views:
            pinned.update({each.tenant: each.num_tokens for each in view.status.tenant_pins})
        for usage in router.tenants:
            usage.num_pinned_tokens = pinned[usage.tenant]
        return pb.GetClusterStatusResponse(router=router, workers=views, planner=self._parts.planner.latest())

    def router(self) -> pb.RouterStatus:
        """Return the state of the router itself."""
        parts = self._parts
        return message_of(
            pb.RouterStatus,
            *(parts.orchestrator.calls.totals, parts.orchestrator, parts.admission, parts.line, parts.config),
            num_bookings=len(parts.fleet.bookings),
            num_index_blocks=parts.index.num_blocks,
            http_port=self.http_port,
            is_encrypted=self._is_encrypted,
            alarms=parts.alarms.texts,
            hot_prefixes=[
                message_of(pb.HotPrefix, each, holders=[message_of(pb.PrefixHolder, holder) for holder in each.holders])
                for each in parts.chooser.hot_prefixes.hottest()
            ],
        )

    async def _view(self, member: Member, timeout_s: float) -> pb.WorkerView:
        endpoint, parts = member.endpoint, self._parts
        _num_attempts, num_failed = member.attempts.counts(parts.clock.monotonic())
        view = pb.WorkerView(
            worker_id=endpoint.worker_id,
            address=endpoint.address,
            state=member.state_text,
            role=endpoint.role,
            slowness=parts.alarms.pace.slow.get(endpoint.worker_id, 0.0),
            num_failed_attempts=num_failed,
            timing=timing_to_proto(replace(member.timing, links={}), {}),
            exact_resume=None if member.facts is None else member.facts.exact_resume,
        )
        if member.state is WorkerState.READY:
            with suppress(KvrelayError):  # unreachable for now: the view shows no status
                view.status.CopyFrom(await member.client.status(timeout_s=timeout_s))
        return view
