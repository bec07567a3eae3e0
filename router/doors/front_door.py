"""The path of a request that all doors share: gRPC (service.py) and HTTP (http/).

    with door.account(life):                         # counted, however it ends
        tenant = door.identify(headers)               # Unauthenticated
        async with door.serving(request, caller) as served:
            …                                         # Overloaded, RequestError; then served.outbox until None

`serving` admits the request, reads it, counts its tokens and runs it beside the block. The error of a failed request is
raised when the block ends.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from common.errors import KvrelayError, Overloaded, Refused, Unreachable, WorkerLost
from common.ids import HashRoot, mint_request_id
from common.lifecycle import LifeCycle
from common.structured import one_turn
from common.wire import message_of, pack_floats
from kvrelay.v1 import inference_pb2 as pb
from router.doors.authentication import Authenticator
from router.doors.readers import Readers
from router.fleet.member import Member, WorkerState
from router.parts import RouterParts
from router.placement.answer_pool import AnswerPool
from router.reading.validation import RequestReader
from router.record.budget import Holding
from router.record.outbox import MergeWindow
from router.record.record import Job, RunningRequest
from router.record.ticket import Ticket
from router.tenants import Tenant, Terms, read_salt, read_terms

MAX_REQUEST_S = 3600.0
"""Deadline of a request whose client names none."""

ClientRequest = pb.GenerateRequest | pb.EmbedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, and what is known before the request is read."""

    tenant: Tenant
    life: LifeCycle
    traceparent: str = ""
    """Place in a trace of its own that the client names (common/tracing.py)."""


class FrontDoor:
    """Takes requests from clients. Event loop only."""

    def __init__(
        self,
        parts: RouterParts,
        reader: RequestReader,
        *,
        authenticator: Authenticator,
        default_terms: Terms,
        merging: MergeWindow | None = None,
        block_key: bytes,
    ) -> None:
        """`merging` adapts to the load of the process; without it every token goes out at once.

        `block_key` keys the block hashes of all requests; routers that share workers have the same key.
        """
        self.parts = parts
        self.reader = reader
        self.readers = Readers()
        self.merging = MergeWindow() if merging is None else merging
        self._authenticator = authenticator
        self._default_terms = default_terms
        self._block_key = block_key
        self._is_closed = False
        self.is_leaving = False
        """Whether new requests are refused for now, as after `close`."""

    def close(self) -> None:
        """Refuse new requests from now on, so that clients of several routers go to another one."""
        self._is_closed = True

    def end(self) -> None:
        """End the threads and processes that read requests; none can be read any more. Any thread."""
        self.reader.close()
        self.readers.close()

    @property
    def obstacle(self) -> KvrelayError | None:
        """Why no request could be served now; None when requests can be served."""
        if self._is_closed or self.is_leaving:
            return Unreachable("this router is stopping; ask another one")
        if not self.parts.fleet.can_answer(AnswerPool.DECODE):
            return WorkerLost("no decode worker is ready")
        return None

    def new_life(self, *, deadline_s: float = math.inf) -> LifeCycle:
        """Return the life cycle of a request that arrives now, under a new id."""
        return LifeCycle(mint_request_id(), self.parts.clock, deadline_s=deadline_s)

    def account(self, life: LifeCycle) -> AbstractContextManager[None]:
        """Count a request and how it ends, whatever happens inside."""
        return self.parts.orchestrator.calls.account(life)

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return the tenant that metadata or headers name. Raises Unauthenticated."""
        return self._authenticator.identify(metadata)

    def screen(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Return if a call of a gRPC method comes from a known caller and may be read. Raises KvrelayError."""
        try:
            if method.endswith(("/GetClusterStatus", "/Diagnose", "/ForgetTenant")):
                self.check_operator(metadata)
            else:
                self.identify(metadata)
        except KvrelayError:
            if method.endswith(("/Generate", "/Embed")):
                with self.account(self.new_life()):
                    raise
            raise

    def check_operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Return if the metadata of a call name an operator. Raises Unauthenticated, AccessDenied."""
        self._authenticator.check_operator(metadata)

    async def forget(self, request: pb.ForgetTenantRequest, *, timeout_s: float) -> pb.ForgetTenantResponse:
        """Let every worker forget a tenant's blocks. Raises InvalidRequest for an unknown one, and WorkerLost."""
        tenant = self._authenticator.tenant_named(request.tenant)
        fleet = self.parts.fleet
        if fleet.model is None:
            raise WorkerLost("cannot name the blocks to forget: no worker is ready; start the workers first")
        root = fleet.model.keyed(self._block_key, cache_salt=read_salt(request, tenant=tenant)).root
        workers = await asyncio.gather(*(_forget(member, root, timeout_s=timeout_s) for member in fleet.members))
        return pb.ForgetTenantResponse(workers=workers, sharing_tenants=self._authenticator.sharing(tenant))

    @asynccontextmanager
    async def serving(self, request: ClientRequest, caller: Caller) -> AsyncIterator[RunningRequest]:
        """Serve a request beside the block, which takes its messages; leaving the block early cancels the request.

        Clears the prompt of `request` once it is read: a router holds it as token ids from then on.

        Raises KvrelayError before the block when the request is refused, and after it when the request failed.
        """
        orchestrator = self.parts.orchestrator
        stages = orchestrator.traces.begin(caller.life, caller.tenant, caller.traceparent)
        with self._admit(request, caller.tenant) as ticket:
            stages.enter("tokenize")
            async with ticket.kept():
                job = await self._read(request, caller)
            request.ClearField("prompt")
            stages.enter("line")
            orchestrator.take_tokens(ticket, job)
            caller.life.end_within(MAX_REQUEST_S)
            async with orchestrator.running(job, ticket, caller.life) as record:
                yield record
            if record.outbox.error is not None:
                raise record.outbox.error

    async def embed(self, request: pb.EmbedRequest, caller: Caller) -> pb.EmbedResponse:
        """Return an embedding; a caller that is cancelled cancels the request. Raises KvrelayError."""
        response = pb.EmbedResponse(request_id=caller.life.request_id)
        async with self.serving(request, caller) as served:
            response.model, response.fingerprint = served.job.model.name, served.job.model.fingerprint
            while (message := await served.outbox.get()) is not None:
                if message.HasField("plan"):
                    response.plans.append(message.plan)
                elif message.HasField("completed"):
                    response.completed.CopyFrom(message.completed)
        assert served.outbox.embedding is not None, "a request that has not failed is answered"
        response.embedding = pack_floats(served.outbox.embedding)
        return response

    async def enter(self, metadata: Iterable[tuple[str, str | bytes]] | None, *, needs_worker: bool = True) -> Tenant:
        """Return the sender of a request when the request may be read; the running task is charged to it from then on.

        Raises Unauthenticated, and Overloaded when the tenant may send no request now, which also counts as demand if
        the request `needs_worker`.
        """
        tenant = self.identify(metadata)
        try:
            await self.parts.admission.enter(tenant)
        except Overloaded:
            if needs_worker:
                self.parts.orchestrator.demand.note_arrival()
            raise
        return tenant

    async def turn(self, tenant: Tenant) -> None:
        """Return when a running request of the tenant may take some milliseconds of the event loop; never at once."""
        await one_turn()
        await self.parts.admission.wait_turn(tenant)

    def arriving(self, tenant: Tenant) -> AbstractContextManager[Holding]:
        """Hold the bytes of a request that arrives and is read, inside the block."""
        return self.parts.admission.arriving(tenant)

    def tokenizing(self, tenant: Tenant) -> AbstractContextManager[None]:
        """Count a call that only tokenizes, inside the block, as a request of its tenant. Raises Overloaded."""
        return self.parts.admission.inquiry(tenant)

    def _admit(self, request: ClientRequest, tenant: Tenant) -> Ticket:
        """Return a ticket. Raises Overloaded, which also counts as demand, and Unreachable while the door is closed."""
        if self._is_closed or self.is_leaving:
            raise Unreachable("this router is stopping; ask another one")
        self.parts.orchestrator.demand.note_arrival()
        terms = read_terms(request, tenant=tenant, default=self._default_terms)
        admitted = self.parts.admission.admit(tenant, terms)
        if isinstance(admitted, Refused):
            raise admitted.error()
        return admitted

    async def _read(self, request: ClientRequest, caller: Caller) -> Job:
        """Return the checked request; waits until a worker has described the model. Raises KvrelayError."""
        patience_s = min(self.parts.config.queue_timeout_s, caller.life.left_s)
        pool = AnswerPool.PREFILL if isinstance(request, pb.EmbedRequest) else AnswerPool.DECODE
        model = await self.parts.fleet.wait_for_model(timeout_s=patience_s, pool=pool)
        keyed = model.keyed(self._block_key, cache_salt=read_salt(request, tenant=caller.tenant))
        request_id = caller.life.request_id
        if isinstance(request, pb.EmbedRequest):
            return await self.reader.read_embedding(request, request_id=request_id, model=keyed, tenant=caller.tenant)
        return await self.reader.read(request, request_id=request_id, model=keyed, tenant=caller.tenant)


async def _forget(member: Member, root: HashRoot, *, timeout_s: float) -> pb.ForgottenWorker:
    worker_id = member.endpoint.worker_id
    trouble = member.state_text
    if member.state is WorkerState.READY:
        try:
            return message_of(
                pb.ForgottenWorker, await member.client.forget(root, timeout_s=timeout_s), worker_id=worker_id
            )
        except KvrelayError as error:
            trouble = error.message
    advice = "its blocks may still be there; run it again when it is ready, or remove its folder below tiers.path"
    return pb.ForgottenWorker(worker_id=worker_id, trouble=f"{trouble}: {advice}")
