"""One request's life, from its admission to its one terminal message.

1. QUEUED: the request waits in line for a plan (line/); the plan is booked in the same step.
2. RESERVING, PREFILLING, HANDOFF, DECODING: an attempt runs the plan (attempt.py). Tokens go to the client as they
   come, each index of each sample once and in order (ledger.py).
3. A worker refuses (Overloaded): the booking is released and the request goes back to its place in line.
4. A worker is lost, restarted or faulty, or the transfer breaks: the workers concerned are out of use until they answer
   again, and the request gets another plan, at most `max_attempts` in all. A single sample continues after its last
   delivered token; several samples that have begun continue separately, side by side.
   A draining decode worker hands its requests over in the same way, after the next token, as often as needed:
   nothing has failed, and the next worker pulls the KV from it. An answer that is set back, because its tenant has more
   than its share of a full pool (choosing/shares.py), ends its attempt at once and waits in its tenant's order.
5. FINISHED, FAILED or CANCELLED: calls, bookings, tasks and the ticket are gone before the client's call ends.

A client that goes away, or whose deadline passes, cancels the task that runs this; every step releases on its way out.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from common.clock import Clock
from common.config import RouterConfig
from common.errors import (
    DeadlineExceeded,
    KvCorrupt,
    KvrelayError,
    Overloaded,
    Refused,
    TransferError,
    WorkerError,
    WorkerLost,
)
from common.lifecycle import LifeCycle, State
from common.rpc import to_report
from common.structured import TaskCensus, all_or_first_failure
from kvrelay.v1 import inference_pb2
from router.choosing.chooser import Chooser
from router.fleet.decisions import Booking
from router.fleet.fleet import Fleet
from router.fleet.lives import is_failure
from router.line.line import Line
from router.line.queued_requests import Leg, QueuedRequestBuilder
from router.observe.call_outcomes import CallOutcomes
from router.observe.in_flight import InFlight
from router.observe.metrics import RouterMetrics
from router.observe.recent_requests import RecentRequests
from router.observe.tracing import RequestTraces
from router.observe.traffic import TrafficRecordings
from router.placement.running import RunningAnswer
from router.record.crash_budget import CrashBudget
from router.record.demand import DemandMeter
from router.record.lengths import AnswerLengths
from router.record.outbox import Outbox
from router.record.record import Delivery, Job, RunningRequest
from router.record.ticket import Ticket
from router.requests.attempt import Attempt, AttemptFailed, AttemptOutcome
from router.requests.embedding_attempt import EmbeddingAttempt
from router.requests.generation_attempt import GenerationAttempt
from router.requests.worker_requests import WorkerRequests

logger = logging.getLogger(__name__)


class Orchestrator:
    """Runs requests. Event loop only."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        line: Line,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Clock,
        config: RouterConfig,
    ) -> None:
        self._fleet = fleet
        self._line, self._admission = line, line.admission
        self._chooser = chooser
        self._metrics = metrics
        self._clock = clock
        self._config = config
        self.has_coupled_drafts = True
        """Whether drafts, if there are any, change no sampled token."""
        self._census = TaskCensus()
        self._lengths = AnswerLengths()
        self._queued_requests = QueuedRequestBuilder(fleet=fleet, lengths=self._lengths, clock=clock, config=config)
        self._crash_budget = CrashBudget(config.max_lost_workers, fleet.lives.find_ended, clock)
        self.recordings = TrafficRecordings(clock)
        self.traces = RequestTraces(clock)
        self.demand = DemandMeter(clock)
        self.calls = CallOutcomes(metrics=metrics, traces=self.traces, demand=self.demand)
        self.recent = RecentRequests(clock)
        self.in_flight = InFlight(clock)

    @property
    def num_request_tasks(self) -> int:
        """Tasks that serve requests: the clients' calls and the tasks that these started."""
        return self.calls.num_open + self._census.num_tasks

    def _draws_again_the_same(self, job: Job) -> bool:
        """Return whether a worker that continues the answer draws the tokens that the one before would have drawn."""
        return self.has_coupled_drafts or job.sampling.is_greedy or job.delivery is Delivery.DIRECT

    def take_tokens(self, ticket: Ticket, job: Job) -> None:
        """Count the size of a request against the rate of its tenant, before it runs. Raises Overloaded."""
        refused = self._admission.take_tokens(
            ticket, self._queued_requests.expected_service(job, ticket.account.tenant.name)
        )
        if refused is not None:
            raise refused.error()

    @asynccontextmanager
    async def running(self, job: Job, ticket: Ticket, life: LifeCycle, *, timeout_s: float) -> AsyncIterator[Outbox]:
        """Run a job beside the block, which takes its messages. Leaving the block early cancels the job."""
        record = RunningRequest(job, life, self._clock, deadline_s=self._clock.monotonic() + timeout_s)
        accepted = inference_pb2.Accepted(
            request_id=job.request_id,
            num_prompt_tokens=len(job.prompt_token_ids),
            seed=job.sampling.seed,
            fingerprint=job.model.fingerprint,
            rendered_unix_s=job.rendered_unix_s,
            answer_format=job.answer_format,
            defaults=job.defaults,
            exact_resume=job.model.exact_resume and self._draws_again_the_same(job),
        )
        record.outbox.put(inference_pb2.GenerateResponse(accepted=accepted))
        outbox = record.outbox
        outbox.on_large = partial(self._admission.wait_turn, ticket.account.tenant)
        self.traces.follow(record)
        tenant = ticket.account.tenant.name
        with (
            self._admission.unsent.holding(ticket.account.tenant) as outbox.holding,
            self.recordings.following(record, tenant),
            self.in_flight.following(record, tenant),
        ):
            async with self._census.owned(self._run(record, ticket)):
                yield outbox

    async def _run(self, record: RunningRequest, ticket: Ticket) -> None:
        error: KvrelayError | None = None
        overflow: list[Refused] = []
        try:
            async with asyncio.timeout(record.deadline_s - self._clock.monotonic()) as limit:
                record.outbox.on_overflow = partial(_end_now, limit, overflow)
                self._crash_budget.check(record.job, tenant=ticket.account.tenant.name)
                samples = range(record.job.sampling.n)
                await self._serve(Leg(record=record, ticket=ticket, samples=samples, life=record.life))
            record.life.advance(State.FINISHED)
            record.outbox.put(inference_pb2.GenerateResponse(completed=record.completed))
            self._metrics.observe(record, exemplar=self.traces.exemplar(record.job.request_id))
            self.demand.note_answer(record.answered)
            self.recent.note(record, tenant=ticket.account.tenant.name)
            if record.job.embedding is None:
                self._lengths.learn(record.job, ticket.account.tenant.name, record.ledger.lengths)
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed before the answer was complete")
            if overflow:
                error = overflow[0].error()
        except (Exception, asyncio.CancelledError) as caught:  # noqa: BLE001 - the top of a task
            error = to_report(caught, f"request {record.job.request_id}")
        finally:
            try:
                self._admission.charge_compiling(ticket, record.compile_s)
                self._admission.settle(ticket, record.service)
            finally:  # the client always gets a terminal status
                record.outbox.close(error)

    async def _serve(self, leg: Leg) -> None:
        """Serve a leg until its samples have ended, with a new plan after every worker that is lost or leaves.

        Several samples that have begun, here or at another router, are served separately; beams go on together from
        their last known state, with the same outcome, of which the ledger takes what is new.
        """
        ledger = leg.record.ledger
        while remaining := ledger.unfinished(leg.samples):
            if len(leg.samples) > 1 and ledger.num_tokens and not leg.record.job.sampling.has_beams:
                await self._serve_apart(leg, remaining)
                return
            if leg.num_attempts or leg.record.job.resumed:  # as behind a worker that is lost, many may go on at once
                await self._admission.wait_turn(leg.ticket.account.tenant)
            leg.num_attempts += 1
            try:
                outcome = await self._attempt(leg)
                if outcome is AttemptOutcome.COMPLETED:
                    return
                leg.num_moves += 1
                leg.is_set_back = outcome is AttemptOutcome.SET_BACK
                leg.num_set_back += leg.is_set_back
                self.calls.totals.num_moves += not leg.is_set_back
            except AttemptFailed as failure:
                leg.is_set_back = False
                if not ledger.unfinished(leg.samples):
                    return
                self._raise_if_final(leg, failure)
                tenant = leg.ticket.account.tenant.name
                await self._crash_budget.weigh(leg.record, failure.hold, samples=leg.samples, tenant=tenant)
            leg.life.advance(State.QUEUED)

    def _raise_if_final(self, leg: Leg, failure: AttemptFailed) -> None:
        """Raise the failure's error unless the request may be planned again, which is then counted."""
        error = failure.error
        if not isinstance(error, WorkerError | TransferError):
            raise error
        if leg.num_attempts - leg.num_moves >= self._config.max_attempts:
            raise error
        reason = type(error).__name__
        extra = {"request_id": leg.record.job.request_id, "attempt": leg.num_attempts, "reason": reason}
        logger.warning("planning again: %s", failure, extra=extra)
        self.calls.totals.num_replans += 1
        self._metrics.count_replan(reason)

    async def _serve_apart(self, leg: Leg, remaining: list[int]) -> None:
        """Serve samples that have begun separately: each continues from its own tokens."""
        legs = [
            replace(
                leg,
                samples=range(sample_index, sample_index + 1),
                # The life cycle of the request follows the first sample.
                life=LifeCycle(leg.life.request_id, self._clock) if position else leg.life,
            )
            for position, sample_index in enumerate(remaining)
        ]
        async with self._census.owned(*(self._serve(one) for one in legs)) as tasks:
            await all_or_first_failure(tasks)

    async def _attempt(self, leg: Leg) -> AttemptOutcome:
        """Find a plan and run it; after a worker's refusal, queue again. Raises AttemptFailed."""
        queued, tenant = self._queued_requests.build(leg), leg.ticket.account.tenant.name
        following = partial(self._chooser.decisions.following, tenant=tenant, attempt=leg.num_attempts)
        hashes = queued.search.request.hashes
        while True:
            with (
                await self._line.place(queued) as booking,
                self.traces.attempt(leg.life, booking.decision) as traceparent,
                following(booking.decision),
            ):
                self._check_model(leg)
                leg.record.plan = booking.plan
                if leg.num_attempts == 1:
                    evicted_tokens = booking.decision.num_evicted_blocks * leg.record.job.model.block_size
                    leg.record.num_evicted_tokens = evicted_tokens
                if leg.record.life.first(State.PREFILLING) is None:
                    leg.record.waits += booking.decision.waits
                kind = GenerationAttempt if leg.record.job.embedding is None else EmbeddingAttempt
                attempt = kind(
                    requests=WorkerRequests(
                        record=leg.record,
                        samples=leg.samples,
                        booking=booking,
                        issue=self._fleet.issue,
                        tenant=tenant,
                        traceparent=traceparent,
                    ),
                    life=leg.life,
                    number=leg.num_attempts,
                    metrics=self._metrics,
                    census=self._census,
                    on_started=partial(self._admission.correct_cached, leg.ticket),
                    on_transferred=partial(self._chooser.expect, booking.plan.decode, hashes),
                    has_another=partial(self._fleet.has_another, booking.decode.member),
                    must_move=partial(self._fleet.is_leaving, booking.decode.member),
                )
                try:
                    with self._chooser.expecting(booking, hashes):
                        outcome = await self._run_attempt(leg, booking, attempt)
                except AttemptFailed as failure:
                    booking.decision.ended = type(failure.error).__name__
                    if not isinstance(failure.error, Overloaded):
                        self._suspect(leg, booking, failure)
                        raise
                    leg.life.advance(State.QUEUED)
                    refusing = failure.hold.member.endpoint.worker_id
                    self._metrics.count_refusal(failure.hold.member.endpoint.role)
                    self._chooser.exclude(queued.search, refusing, retry_after_s=failure.error.retry_after_s)
                else:
                    booking.decision.ended = outcome.value
                    for hold in booking.holds:
                        self._fleet.note_ended(hold)
                    if outcome is not AttemptOutcome.COMPLETED:
                        self._chooser.retract(booking, hashes)
                    return outcome

    async def _run_attempt(self, leg: Leg, booking: Booking, attempt: Attempt) -> AttemptOutcome:
        """Run an attempt until it ends or its answer is set back. Raises AttemptFailed."""
        if leg.record.job.embedding is not None:
            return await attempt.run()
        try:
            async with asyncio.timeout(None) as running:
                booking.answer = RunningAnswer(
                    tenant=leg.ticket.account.tenant.name,
                    number=leg.ticket.number,
                    num_places=len(leg.samples),
                    began_s=self._clock.monotonic(),
                    num_set_back=leg.num_set_back,
                    count_blocks=lambda: leg.num_blocks,
                    running=running,
                )
                return await attempt.run()
        except TimeoutError:
            if not running.expired():
                raise
            return AttemptOutcome.SET_BACK
        finally:
            booking.answer = None

    def _check_model(self, leg: Leg) -> None:
        """Raise WorkerLost when the workers now serve another model, which would continue with other tokens."""
        model, now = leg.record.job.model, self._fleet.model
        if now is None or now.fingerprint != model.fingerprint:
            raise WorkerLost(f"the workers of model {model.name} ({model.fingerprint}) are gone")

    def _suspect(self, leg: Leg, booking: Booking, failure: AttemptFailed) -> None:
        """Take the workers of a failed attempt out of use until they answer again.

        A prefill worker that dies makes the decode worker's call fail as well, possibly first. From its own call until
        the handoff is complete, a failed decode call therefore suspects both, and the network between them.
        """
        if not isinstance(failure.error, WorkerError | TransferError):
            return
        suspects = [failure.hold]
        prefill = booking.prefill
        if prefill is not None and not prefill.has_left:
            leg.failed_pairs.add((prefill.life, booking.decode.life))
            if prefill is not failure.hold:
                suspects.append(prefill)
        if not isinstance(failure.error, KvCorrupt):  # both workers were alive: a later end has another reason
            used = [hold.life for hold in booking.holds if not hold.has_left]
            leg.record.losses.note(used, num_tokens=leg.record.num_steps_done, now_s=self._clock.monotonic())
        for hold in suspects:
            self._fleet.note_ended(hold, num_failed=is_failure(failure.error))
            self._fleet.suspect(hold, str(failure))


def _end_now(limit: asyncio.Timeout, overflow: list[Refused], refused: Refused) -> None:
    """End a request whose client does not read; `overflow` gets the reason, once."""
    if not overflow:
        overflow.append(refused)
        limit.reschedule(asyncio.get_running_loop().time())
