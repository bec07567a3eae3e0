"""Answers `Diagnose`: collects what the router and its workers know, and has it judged."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from common.errors import InvalidRequest
from common.ids import RequestId, WorkerId
from common.wire import message_of
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from router.diagnosis import answer_times, in_line
from router.diagnosis.finding import DiagnosisInput
from router.diagnosis.findings import find
from router.diagnosis.pool import DiagnosedPool, DiagnosedWorker
from router.diagnosis.status import StatusReporter
from router.fleet.decisions import DecisionLog
from router.observe.recent_requests import REMEMBERED_S
from router.parts import RouterParts

DEFAULT_WINDOW_S = 300.0
WALL_WINDOWS_S = (60.0, 300.0, 3600.0)
"""The windows of WorkerStatus.recent_steps."""


class DiagnosisService:
    """Judges the last minutes of one router."""

    def __init__(self, parts: RouterParts, reporter: StatusReporter) -> None:
        """`reporter` asks the workers."""
        self._parts = parts
        self._reporter = reporter

    async def answer(self, request: pb.DiagnoseRequest, *, timeout_s: float) -> pb.DiagnoseResponse:
        """Return what costs time. Raises InvalidRequest."""
        window_s = request.window_s or DEFAULT_WINDOW_S
        if not 1 <= window_s <= REMEMBERED_S:
            raise InvalidRequest(f"{window_s:g} is not from 1 to {REMEMBERED_S:g} seconds", field="window_s")
        if not request.request_id:
            return self.judge(await self._reporter.status(timeout_s=timeout_s), window_s=window_s)
        recent = self._parts.orchestrator.recent
        found = recent.find(RequestId(request.request_id))
        if found is None:
            why = f"this router has answered no request {request.request_id} in the last hour"
            raise InvalidRequest(why, field="request_id")
        others = [each for each in recent.over(window_s) if each is not found]
        headline, sentences = answer_times.describe(found, others)
        return pb.DiagnoseResponse(headline=headline, findings=[pb.Finding(text=text) for text in sentences])

    def judge(self, status: pb.GetClusterStatusResponse, *, window_s: float) -> pb.DiagnoseResponse:
        """Return what costs time by the workers' own reports."""
        orchestrator, chooser = self._parts.orchestrator, self._parts.chooser
        requests, waiting = orchestrator.recent.over(window_s), self._parts.line.waiting()
        prefill, decode = (
            self._pool(role, status.workers, window_s)
            for role in (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
        )
        view = DiagnosisInput(
            requests=requests,
            waiting=waiting,
            reader=prefill if prefill.workers else decode,
            decoder=decode if decode.workers else prefill,
            prefixes=chooser.hot_prefixes.hottest(),
            terms=partial(_terms_of, chooser.decisions),
        )
        causes = find(view) if view.reader.workers else []  # else no worker answers
        return pb.DiagnoseResponse(
            headline=answer_times.headline(
                requests,
                window_s=window_s,
                slo=orchestrator.demand.slo,
                num_running=orchestrator.in_flight.num_running,
            ),
            waiting=in_line.describe_line(waiting),
            tenants=[message_of(pb.TenantWaits, each) for each in in_line.waits_by_tenant(requests, waiting)],
            findings=[
                message_of(
                    pb.Finding,
                    each,
                    cause=each.cause.value,
                    predictions=[message_of(pb.Prediction, predicted) for predicted in each.predictions],
                )
                for each in causes
            ],
            walls=[
                message_of(pb.PoolWalls, each, each.walls, pool=each.name)
                for pool in (prefill, decode)
                if pool.workers
                for each in map(pool.over, WALL_WINDOWS_S)
            ],
        )

    def _pool(
        self, role: "worker_pb2.WorkerRole.ValueType", views: Sequence[pb.WorkerView], window_s: float
    ) -> DiagnosedPool:
        members = self._parts.fleet.members_by_id
        workers = tuple(
            DiagnosedWorker(
                worker_id=WorkerId(view.worker_id),
                status=view.status,
                timing=member.timing,
                block_size=member.facts.block_size,
                slowness=view.slowness,
            )
            for view in views
            if view.role == role and view.HasField("status")
            if (member := members.get(WorkerId(view.worker_id))) is not None and member.facts is not None
        )
        return DiagnosedPool(name=ROLE_NAMES[role], workers=workers, window_s=window_s)


def _terms_of(decisions: DecisionLog, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Mapping[str, float]]:
    """Return the parts of the cost of the latest plan of each request that is still in the log."""
    wanted, found = frozenset(request_ids), dict[RequestId, Mapping[str, float]]()
    for decision in decisions.newest(len(decisions)):
        if decision.request_id in wanted and decision.request_id not in found:
            chosen = next(iter(decision.plan.candidates()), None)
            found[decision.request_id] = {} if chosen is None else chosen.terms
    return found
