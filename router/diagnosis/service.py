"""Answers `Diagnose`: collects what the router and its workers know, and has it judged."""

import asyncio
from collections.abc import Sequence

from common.errors import InvalidRequest, KvrelayError
from common.ids import RequestId
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from router.diagnosis import findings, one_request
from router.diagnosis.pool import Pool, Worker
from router.diagnosis.recent_requests import REMEMBERED_S, RecentRequest
from router.member import Member, WorkerState
from router.parts import RouterParts

DEFAULT_WINDOW_S = 300.0
"""A window of WorkerStatus.recent_steps."""


class Diagnosis:
    """Judges the last minutes of one router."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def answer(self, request: pb.DiagnoseRequest, *, timeout_s: float) -> pb.DiagnoseResponse:
        """Return what costs time. Raises InvalidRequest."""
        window_s = request.window_s or DEFAULT_WINDOW_S
        if not 1 <= window_s <= REMEMBERED_S:
            raise InvalidRequest(f"{window_s:g} is not from 1 to {REMEMBERED_S:g} seconds", field="window_s")
        recent = self._parts.orchestrator.recent
        if request.request_id:
            found = recent.find(RequestId(request.request_id))
            if found is None:
                why = f"this router has answered no request {request.request_id} in the last hour"
                raise InvalidRequest(why, field="request_id")
            others = [each for each in recent.over(window_s) if each is not found]
            headline, sentences = one_request.describe(found, others)
            return pb.DiagnoseResponse(headline=headline, findings=[pb.Finding(text=text) for text in sentences])
        requests = recent.over(window_s)
        view = await self._view(requests, window_s, timeout_s=timeout_s)
        causes = [] if view is None else findings.find(view)
        return pb.DiagnoseResponse(
            headline=findings.headline(requests, window_s=window_s, slo=self._parts.orchestrator.demand.slo),
            findings=[
                pb.Finding(
                    cause=each.cause.value, pool=each.pool, lost_s=each.lost_s, text=each.text, changes=each.changes
                )
                for each in causes
            ],
        )

    async def _view(
        self, requests: Sequence[RecentRequest], window_s: float, *, timeout_s: float
    ) -> findings.View | None:
        """Return what is known of requests and workers; None when no worker answers."""
        members = [member for member in self._parts.fleet.members if member.state is WorkerState.READY]
        asked = await asyncio.gather(*(self._ask(member, timeout_s) for member in members))
        workers = [worker for worker in asked if worker is not None]
        prefill, decode = (
            self._pool(role, members, workers, window_s)
            for role in (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
        )
        if not workers:
            return None
        return findings.View(
            requests=requests,
            reader=prefill if prefill.workers else decode,
            decoder=decode if decode.workers else prefill,
        )

    def _pool(
        self,
        role: "worker_pb2.WorkerRole.ValueType",
        members: Sequence[Member],
        workers: Sequence[Worker],
        window_s: float,
    ) -> Pool:
        names = {member.endpoint.worker_id for member in members if member.endpoint.role == role}
        own = tuple(worker for worker in workers if worker.worker_id in names)
        return Pool(name=ROLE_NAMES[role], workers=own, window_s=window_s)

    async def _ask(self, member: Member, timeout_s: float) -> Worker | None:
        """Return a worker's own report with what the router knows of it; None when it does not answer."""
        try:
            status = await member.client.status(timeout_s=timeout_s)
        except KvrelayError:
            return None
        worker_id = member.endpoint.worker_id
        slowness = self._parts.alarms.pace.slow.get(worker_id, 0.0)
        return Worker(worker_id=worker_id, status=status, timing=member.timing, slowness=slowness)
