"""The gRPC services of the router: one for clients, one for the controller."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from common.demand import demand_to_proto
from common.errors import InvalidRequest
from common.ids import RequestId, WorkerId
from common.lifecycle import LifeCycle
from common.rpc import error_boundary, time_left_s
from common.structured import for_each
from common.timing import timing_to_proto
from common.tracing import traceparent_in
from common.wire import check_length, message_of
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, router_admin_pb2, router_admin_pb2_grpc, worker_pb2
from router.diagnosis.service import DiagnosisService
from router.diagnosis.status import StatusReporter
from router.doors.front_door import Caller, FrontDoor
from router.fleet.decisions import CAPACITY, explain_one
from router.fleet.facts import WorkerEndpoint
from router.fleet.member import Member, WorkerState
from router.parts import RouterParts
from router.reading.parsed_answers import ParsedAnswer
from router.record.demand import REMEMBERED_S
from router.tenants import Tenant

STATUS_TIMEOUT_S = 1.0
FORGET_TIMEOUT_S = 600.0
"""Time for workers to overwrite a tenant's blocks on disk."""
MAX_WORKERS = 4096
MAX_TOKENIZED = 1 << 20
"""Tokens of one answer of `Tokenize`, which gRPC packs without a pause."""
_SLICE_TOKENS = 1 << 14
_MAX_ID_CHARS = 128
_MAX_ADDRESS_CHARS = 300
"""The longest DNS name and a port are shorter."""
DEFAULT_EXPLAINED = 20

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients."""

    def __init__(self, door: FrontDoor, reporter: StatusReporter | None = None) -> None:
        self._door = door
        self._parts = door.parts
        self._reader = door.reader
        self._reporter = reporter or StatusReporter(door.parts)
        self._diagnosis = DiagnosisService(door.parts, self._reporter)

    # A coroutine that writes, not a generator: a generator that is cancelled while gRPC sends is closed only later.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        door, life = self._door, self._new_life(context)
        async with error_boundary(context, "Generate"):
            with door.account(life):
                caller = self._caller(context, life)
                async with door.serving(request, caller) as served:
                    parsed = await ParsedAnswer.of(served.job)
                    while (message := await served.outbox.get()) is not None:
                        if parsed is not None and message.HasField("tokens"):
                            await parsed.add_to(message.tokens)
                        await context.write(message)
                        if message.HasField("tokens"):
                            await door.merging.over()
                    served.ends_in_calls = parsed is not None and parsed.ends_in_calls

    def _new_life(self, context: Context) -> LifeCycle:
        """Return the life cycle of a call that arrives now."""
        life = self._door.new_life()
        life.end_within(context.time_remaining())
        return life

    def _caller(self, context: Context, life: LifeCycle) -> Caller:
        """Return the sender of a call. Raises Unauthenticated."""
        return Caller(
            tenant=self._identify(context),
            life=life,
            traceparent=traceparent_in(context.invocation_metadata()),
        )

    def _identify(self, context: Context) -> Tenant:
        """Return the tenant that calls. Raises Unauthenticated."""
        return self._door.identify(context.invocation_metadata())

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: D102
        door, life = self._door, self._new_life(context)
        async with error_boundary(context, "Embed"):
            with door.account(life):
                caller = self._caller(context, life)
                return await door.embed(request, caller)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: D102
        async with error_boundary(context, "Tokenize"):
            tenant, model, reader = self._identify(context), self._parts.fleet.model, self._reader
            with self._door.tokenizing(tenant):
                match request.WhichOneof("input"):
                    case "text":
                        tokens = await reader.encode_text(request.text, model, tenant=tenant)
                    case "chat":
                        tokens = (await reader.encode_chat(request.chat, model, tenant=tenant)).token_ids
                    case _:
                        raise InvalidRequest("one of text and chat must be set", field="input")
                check_length(len(tokens), MAX_TOKENIZED, field="tokens")
                pieces = await reader.pieces(tokens, tenant=tenant)
            answer = pb.TokenizeResponse()

            def add(start: int) -> None:
                answer.token_ids.extend(tokens[start : start + _SLICE_TOKENS])
                answer.pieces.extend(pieces[start : start + _SLICE_TOKENS])

            await for_each(range(0, len(tokens), _SLICE_TOKENS), add)
            return answer

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: D102
        async with error_boundary(context, "ListModels"):
            self._identify(context)
            model = self._parts.fleet.model
            if model is None:
                return pb.ListModelsResponse()
            info = message_of(pb.ModelInfo, model)
            return pb.ListModelsResponse(models=[info])

    async def GetClusterStatus(  # noqa: D102
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        async with error_boundary(context, "GetClusterStatus"):
            self._door.check_operator(context.invocation_metadata())
            return await self._reporter.status(timeout_s=time_left_s(context, at_most_s=STATUS_TIMEOUT_S))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: D102
        async with error_boundary(context, "Explain"):
            tenant = self._identify(context)
            decisions = self._parts.chooser.decisions.latest(
                tenant=tenant.name,
                limit=min(request.limit or DEFAULT_EXPLAINED, CAPACITY),
                request_id=RequestId(request.request_id) if request.request_id else None,
            )
            answer = pb.ExplainResponse()
            policy, now_s = self._parts.config.policy, self._parts.clock.monotonic()
            explained = (explain_one(each, policy, now_s) for each in decisions)
            await for_each(explained, answer.decisions.append, partial(self._door.turn, tenant))
            return answer

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Context) -> pb.DiagnoseResponse:  # noqa: D102
        async with error_boundary(context, "Diagnose"):
            self._door.check_operator(context.invocation_metadata())
            return await self._diagnosis.answer(request, timeout_s=time_left_s(context, at_most_s=STATUS_TIMEOUT_S))

    async def ForgetTenant(self, request: pb.ForgetTenantRequest, context: Context) -> pb.ForgetTenantResponse:  # noqa: D102
        async with error_boundary(context, "ForgetTenant"):
            self._door.check_operator(context.invocation_metadata())
            return await self._door.forget(request, timeout_s=time_left_s(context, at_most_s=FORGET_TIMEOUT_S))

    async def RecordTraffic(self, request: pb.RecordTrafficRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        async with error_boundary(context, "RecordTraffic"):
            tenant, duration_s = self._identify(context), request.duration_s
            if not 0 <= duration_s < math.inf:
                raise InvalidRequest(f"{duration_s:g} is not a number of seconds", field="duration_s")
            recordings = self._parts.orchestrator.recordings
            with recordings.open(tenant.name, duration_s=duration_s or math.inf) as recording:
                await context.write(recording.message())
                while (message := await recording.next()) is not None:
                    await context.write(message)
                await context.write(recording.message())


class RouterAdminService(router_admin_pb2_grpc.RouterAdminServiceServicer):
    """Serves the controller."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._parts = door.parts
        self._fleet = door.parts.fleet

    async def GetDemand(  # noqa: D102
        self, request: router_admin_pb2.GetDemandRequest, context: Context
    ) -> router_admin_pb2.GetDemandResponse:
        async with error_boundary(context, "GetDemand"):
            if not 1 <= request.window_s <= REMEMBERED_S:
                raise InvalidRequest(f"{request.window_s:g} is not from 1 to {REMEMBERED_S}", field="window_s")
            return _demand_report(self._parts, window_s=request.window_s)

    async def SetWorkers(  # noqa: D102
        self, request: router_admin_pb2.SetWorkersRequest, context: Context
    ) -> router_admin_pb2.SetWorkersResponse:
        async with error_boundary(context, "SetWorkers"):
            endpoints = _endpoints(request.workers)
            draining = {WorkerId(worker.worker_id) for worker in request.workers if worker.draining}
            self._fleet.is_without_prefill = request.without_prefill
            num_ready = self._fleet.set_workers(endpoints, draining=draining)
            self._door.is_leaving = request.leaving
            if request.HasField("planner"):
                self._parts.planner.take(request.planner)
            members = self._fleet.members_by_id
            num_users = {str(worker_id): members[worker_id].num_users for worker_id in draining}
            return router_admin_pb2.SetWorkersResponse(
                num_ready=num_ready,
                num_users=num_users,
                ready_worker_ids=sorted(self._fleet.roster.ready),
                leaving_worker_ids=sorted(name for name, member in members.items() if member.is_leaving),
                num_requests=self._parts.orchestrator.num_request_tasks,
                worker_health=_worker_health(self._parts),
                shortage="" if self._fleet.model is None else self._fleet.model.shortage,
            )


def _endpoints(workers: Sequence[router_admin_pb2.WorkerEndpoint]) -> list[WorkerEndpoint]:
    """Return the checked membership. Raises InvalidRequest."""
    if len(workers) > MAX_WORKERS:
        raise InvalidRequest(f"{len(workers)} workers; at most {MAX_WORKERS}", field="workers")
    endpoints: dict[WorkerId, WorkerEndpoint] = {}
    for position, worker in enumerate(workers):
        field = f"workers[{position}]"
        worker_id = WorkerId(worker.worker_id)
        if len(worker_id) > _MAX_ID_CHARS:
            raise InvalidRequest(
                f"has {len(worker_id)} characters, not 1 to {_MAX_ID_CHARS}", field=f"{field}.worker_id"
            )
        if len(worker.address) > _MAX_ADDRESS_CHARS:
            raise InvalidRequest(f"has {len(worker.address)} characters", field=f"{field}.address")
        if not worker_id or worker_id in endpoints:
            raise InvalidRequest(f"worker_id {worker_id!r} is empty or comes twice", field=f"{field}.worker_id")
        if worker.role not in ROLE_NAMES:
            raise InvalidRequest(f"role {int(worker.role)} is unknown", field=f"{field}.role")
        host, _, port = worker.address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidRequest(f"address {worker.address!r} is not host:port", field=f"{field}.address")
        endpoints[worker_id] = WorkerEndpoint(worker_id=worker_id, role=worker.role, address=worker.address)
    return list(endpoints.values())


def _demand_report(parts: RouterParts, *, window_s: float) -> router_admin_pb2.GetDemandResponse:
    """Return the demand of the last `window_s` seconds and every worker as this router knows it."""
    line = parts.line
    demand = parts.orchestrator.demand.demand(
        window_s, num_queued=line.num_queued, num_queued_tokens=line.num_queued_tokens
    )
    return router_admin_pb2.GetDemandResponse(
        demand=demand_to_proto(demand), workers=[_condition(member) for member in parts.fleet.members]
    )


def _worker_health(parts: RouterParts) -> list[router_admin_pb2.WorkerHealth]:
    """Return how the workers whose life is known have done lately."""
    now_s, pace = parts.clock.monotonic(), parts.alarms.pace
    found = []
    for worker_id, member in parts.fleet.members_by_id.items():
        if member.facts is not None:
            num_attempts, num_failed = member.attempts.counts(now_s)
            found.append(
                router_admin_pb2.WorkerHealth(
                    worker_id=worker_id,
                    epoch=member.facts.epoch,
                    num_attempts=num_attempts,
                    num_failed=num_failed,
                    slowness=pace.slowness.get(worker_id, 0.0),
                    is_slow=worker_id in pace.slow,
                )
            )
    return found


def _condition(member: Member) -> router_admin_pb2.WorkerCondition:
    endpoint, facts = member.endpoint, member.facts
    condition = router_admin_pb2.WorkerCondition(
        worker_id=endpoint.worker_id,
        role=endpoint.role,
        is_serving=member.state is WorkerState.READY and not member.is_draining,
        is_draining=member.is_draining,
        load=member.report,
        block_size=0 if facts is None else facts.block_size,
        block_bytes=0 if facts is None else facts.block_bytes,
    )
    timing = member.timing
    own = timing.prefill if endpoint.role == worker_pb2.WORKER_ROLE_PREFILL else timing.decode
    if own.is_measured:
        condition.timing.CopyFrom(timing_to_proto(replace(timing, links={}), {}))
    return condition
