"""Sends the requests of a run to routers, behind their front doors, and records what becomes of them.

Requests go out at their times, and those that follow from others, such as the next turn of a chat, when they are due.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from common.block_hash import hash_blocks
from common.errors import KvrelayError, Overloaded, Refused
from common.ids import RequestId, mint_request_id
from common.lifecycle import LifeCycle
from common.sampling import SamplingParams
from kvrelay.client.convert import record
from kvrelay.client.events import PlanChosen
from kvrelay.v1 import inference_pb2
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.simulate.executor import KnownAnswer
from measure.simulate.loop import VirtualLoop
from measure.simulate.policies.affinity import id_in_session
from measure.simulate.records import Arrival, SimSettings
from measure.simulate.tokens import TokenLog
from router.parts import RouterParts
from router.record.record import Job
from router.record.ticket import Ticket
from router.tenants import ANYBODY, NO_TERMS, Tenant, Terms

Progress = Callable[[int], None]
"""Called with the number of requests that have ended."""


class SimClient:
    """All clients of one router. Event loop only."""

    def __init__(
        self,
        router: RouterParts,
        loop: VirtualLoop,
        settings: SimSettings,
        answers: dict[RequestId, KnownAnswer],
        log: TokenLog,
    ) -> None:
        """`answers`: where the engines look up the answers of running requests."""
        self._router = router
        self._loop = loop
        self._settings = settings
        self._answers = answers
        self._log = log
        self.begin_s = 0.0
        """Virtual time that records call 0."""

    async def ask(self, arrival: Arrival, index: int) -> RequestRecord:
        """Send one request and return its record when it has ended."""
        router, settings = self._router, self._settings
        session = index if arrival.session is None else arrival.session
        life = LifeCycle(id_in_session(mint_request_id(), session), router.clock)
        life.end_within(settings.timeout_s)
        request_id = life.request_id
        self._answers[request_id] = KnownAnswer(arrival.num_output_tokens, arrival.answer)
        reply = _Reply()
        failure: KvrelayError | None = None
        try:
            with router.orchestrator.calls.account(life), self._admit(arrival) as ticket:
                job = self._job(arrival, request_id)
                router.orchestrator.take_tokens(ticket, job)
                async with router.orchestrator.running(job, ticket, life) as served:
                    while (message := await served.outbox.get()) is not None:
                        reply.take(message, self._now_s())
                    served.ends_in_calls = arrival.calls_tool
                if served.outbox.error is not None:
                    raise served.outbox.error
        except KvrelayError as error:
            failure = error
        del self._answers[request_id]
        chunk_s = reply.token_times(self._log.take(request_id))
        return RequestRecord(
            index=index,
            session=session,
            turn=arrival.turn,
            place=arrival.place,
            kind=arrival.kind,
            due_s=arrival.at_s,
            sent_s=arrival.at_s,
            chunk_s=chunk_s,
            chunk_tokens=_ones(len(chunk_s)),
            end_s=self._now_s(),
            outcome=Outcome.of(failure, has_tokens=bool(chunk_s)),
            error="" if failure is None else f"{type(failure).__name__}: {failure.message}",
            num_prompt_tokens=len(arrival.prompt),
            num_wanted_tokens=arrival.num_output_tokens,
            server=reply.report(),
        )

    def _now_s(self) -> float:
        return self._loop.time() - self.begin_s

    def _admit(self, arrival: Arrival) -> Ticket:
        terms = Terms(ttft_slo_s=arrival.ttft_slo_s, tpot_slo_s=self._settings.tpot_slo_s)
        return admit(self._router, arrival.tenant, terms)

    def _job(self, arrival: Arrival, request_id: RequestId) -> Job:
        model = self._router.fleet.model
        assert model is not None, "the routers have met the workers"
        model = model.keyed(b"", cache_salt=arrival.tenant.cache_salt)
        max_tokens = arrival.max_tokens or arrival.num_output_tokens
        return Job(
            request_id=request_id,
            prompt_token_ids=arrival.prompt,
            prompt_hashes=hash_blocks(arrival.prompt, root=model.root, block_size=model.block_size),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False),
            model=model,
        )


def admit(router: RouterParts, tenant: Tenant = ANYBODY, terms: Terms = NO_TERMS) -> Ticket:
    """Return a place in a router's queue. Raises Overloaded."""
    router.orchestrator.demand.note_arrival()
    admitted = router.admission.admit(tenant, terms)
    if isinstance(admitted, Refused):
        raise Overloaded(admitted.reason, retry_after_s=admitted.retry_after_s)
    return admitted


class _Reply:
    """Messages of one answer."""

    def __init__(self) -> None:
        self._first_token_s: float | None = None
        self._plans: list[inference_pb2.PlanChosen] = []
        self._completed: inference_pb2.Completed | None = None

    def take(self, message: inference_pb2.GenerateResponse, now_s: float) -> None:
        """Note a message that has arrived."""
        match message.WhichOneof("event"):
            case "tokens":
                if self._first_token_s is None:
                    self._first_token_s = now_s
            case "plan":
                self._plans.append(message.plan)
            case "completed":
                self._completed = message.completed

    def token_times(self, generated_s: Sequence[float]) -> tuple[float, ...]:
        """Return the times at which the client would see tokens that go out one by one: as late as the first one."""
        if self._completed is not None:
            num_tokens = self._completed.usage.num_output_tokens
            assert num_tokens == len(generated_s), f"{len(generated_s)} tokens were generated, {num_tokens} reported"
        if self._first_token_s is None or not generated_s:
            return ()
        first_s = generated_s[0]
        return tuple(self._first_token_s + (at_s - first_s) for at_s in generated_s)

    def report(self) -> ServerReport:
        """Return the router's report: forecasts of the first plan, workers of the last one."""
        if not self._plans:
            return ServerReport()
        first, last = record(PlanChosen, self._plans[0]), self._plans[-1]
        report = ServerReport(
            prefill_worker=last.prefill_worker_id or None,
            decode_worker=last.decode_worker_id or None,
            predicted_ttft_s=first.predicted_ttft_s or None,
            predicted_cached_tokens=first.predicted_cached_tokens,
            ttft_forecast=first.ttft_forecast,
            line_ttft_forecast=first.line_ttft_forecast,
            tpot_forecast=first.tpot_forecast,
        )
        if self._completed is None:
            return report
        usage, timings, transfer = self._completed.usage, self._completed.timings, self._completed.transfer
        return replace(
            report,
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            transfer_s=timings.transfer_s,
            transfer_exposed_s=transfer.exposed_s,
            ttft_s=timings.ttft_s,
            e2e_s=timings.e2e_s,
            num_cached_tokens=usage.num_cached_tokens,
            num_pulled_tokens=usage.num_pulled_tokens,
            num_decode_cached_tokens=usage.num_decode_cached_tokens,
            transfer_bytes=transfer.kv_bytes,
            num_attempts=self._completed.num_attempts,
        )


@cache
def _ones(length: int) -> tuple[int, ...]:
    """Return a tuple of ones, shared by all answers of a length."""
    return (1,) * length


class Crowd:
    """All users of one run. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, clients: Sequence[SimClient], *, begin_s: float, progress: Progress | None = None
    ) -> None:
        """`begin_s`: the loop's time that arrivals call 0. Clients get requests in turn."""
        self._loop = loop
        self._clients = clients
        self._begin_s = begin_s
        self._progress = progress
        self._num_asked = 0
        self._running: set[asyncio.Task[RequestRecord]] = set()
        self._num_to_come = 0
        """Requests that follow from others and are not due yet."""
        self._records: dict[int, RequestRecord] = {}
        self._all_over = asyncio.Event()

    async def serve(self, arrivals: Iterable[Arrival]) -> tuple[RequestRecord, ...]:
        """Serve a workload to the end of its last request; returns the requests in order of arrival. Called once."""
        for arrival in arrivals:
            wait_s = self._begin_s + arrival.at_s - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._ask(arrival)
        while self._running or self._num_to_come:
            self._all_over.clear()
            await self._all_over.wait()
        return tuple(self._records[index] for index in range(self._num_asked))

    def _ask(self, arrival: Arrival) -> None:
        """Send a request now."""
        index = self._num_asked
        self._num_asked += 1
        task = self._loop.create_task(self._clients[index % len(self._clients)].ask(arrival, index))
        self._running.add(task)
        task.add_done_callback(lambda task: self._end(task, arrival))

    def _end(self, task: "asyncio.Task[RequestRecord]", arrival: Arrival) -> None:
        self._running.discard(task)
        if not task.cancelled():
            record = task.result()  # raises what a bug raised
            self._records[record.index] = record
            if self._progress is not None:
                self._progress(len(self._records))
            for following in () if arrival.follow_up is None else arrival.follow_up(record):
                self._num_to_come += 1
                self._loop.call_at(self._begin_s + following.at_s, self._follow, following)
        if not self._running and not self._num_to_come:
            self._all_over.set()

    def _follow(self, arrival: Arrival) -> None:
        self._num_to_come -= 1
        self._ask(arrival)
