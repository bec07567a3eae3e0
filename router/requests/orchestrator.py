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
    TransferError,
    WorkerError,
    WorkerLost,
)
from common.lifecycle import LifeCycle, State
from common.rpc import to_report
from common.structured import TaskTracker, all_or_first_failure
from kvrelay.v1 import inference_pb2
from router.choosing.chooser import Chooser
from router.fleet.booking import Booking
from router.fleet.fleet import Fleet
from router.fleet.lives import is_failure
from router.line.line import Line
from router.observe.call_outcomes import CallOutcomes
from router.observe.in_flight import InFlight
from router.observe.metrics import RouterMetrics
from router.observe.recent_requests import RecentRequests
from router.observe.tracing import RequestTraces
from router.observe.traffic import TrafficRecordings
from router.record.crash_budget import CrashBudget
from router.record.demand import DemandMeter
from router.record.lengths import AnswerLengths
from router.record.record import Delivery, Job, RunningRequest
from router.record.ticket import Ticket
from router.requests.attempt import Attempt, AttemptFailed, AttemptOutcome
from router.requests.embedding_attempt import EmbeddingAttempt
from router.requests.generation_attempt import GenerationAttempt
from router.requests.returns import Returns
from router.requests.sample_group import SampleGroup
from router.requests.waits import WaitBuilder
from router.requests.worker_requests import AttemptServices

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
        self._tracker = TaskTracker()
        self._services = AttemptServices(
            fleet=fleet, chooser=chooser, admission=line.admission, metrics=metrics, tracker=self._tracker
        )
        self._lengths = AnswerLengths()
        self._waits = WaitBuilder(fleet=fleet, lengths=self._lengths, clock=clock, config=config)
        self._crash_budget = CrashBudget(config.max_lost_workers, fleet.lives.find_ended, clock)
        self.recordings = TrafficRecordings(clock)
        self.traces = RequestTraces(clock)
        self.demand = DemandMeter(clock)
        self.calls = CallOutcomes(metrics=metrics, traces=self.traces, demand=self.demand)
        self.recent = RecentRequests(clock)
        self.in_flight = InFlight(clock)
        self._returns = Returns(fleet, clock) if config.retention == "sessions" else None

    @property
    def num_request_tasks(self) -> int:
        """Tasks that serve requests: the clients' calls and the tasks that these started."""
        return self.calls.num_open + self._tracker.num_tasks

    def _draws_again_the_same(self, job: Job) -> bool:
        """Return whether a worker that continues the answer draws the tokens that the one before would have drawn."""
        return self.has_coupled_drafts or job.sampling.is_greedy or job.delivery is Delivery.DIRECT

    def take_tokens(self, ticket: Ticket, job: Job) -> None:
        """Count the size of a request against the rate of its tenant, before it runs. Raises Overloaded."""
        refused = self._admission.take_tokens(ticket, self._waits.expected_service(job, ticket.account.tenant.name))
        if refused is not None:
            raise refused.error()

    @asynccontextmanager
    async def running(self, job: Job, ticket: Ticket, life: LifeCycle) -> AsyncIterator[RunningRequest]:
        """Run a job beside the block, which takes its messages. Leaving the block early cancels the job."""
        record = RunningRequest(job, ticket, life, self._clock)
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
        outbox = record.outbox
        outbox.put(inference_pb2.GenerateResponse(accepted=accepted))
        outbox.on_large = partial(self._admission.wait_turn, record.tenant)
        self.traces.follow(record)
        if self._returns is not None:
            self._returns.begin(record)
        with (
            self._admission.unsent.holding(record.tenant, outbox.overflow) as outbox.holding,
            self.recordings.following(record),
            self.in_flight.following(record),
        ):
            async with self._tracker.owned(self._run(record)):
                yield record
        if self._returns is not None and record.life.state is State.FINISHED:
            self._returns.end(record)

    async def _run(self, record: RunningRequest) -> None:
        error: KvrelayError | None = None
        try:
            async with asyncio.timeout(record.life.left_s) as limit:
                record.outbox.on_overflow = partial(_end_now, limit)
                self._crash_budget.check(record)
                samples = range(record.job.sampling.n)
                await self._serve(SampleGroup(record=record, samples=samples, life=record.life))
            record.life.advance(State.FINISHED)
            record.outbox.put(inference_pb2.GenerateResponse(completed=record.completed))
            self._metrics.observe(record, exemplar=self.traces.exemplar(record.job.request_id))
            self.demand.note_answer(record.answered)
            self.recent.note(record)
            if record.job.embedding is None:
                self._lengths.learn(record.job, record.tenant.name, record.ledger.lengths)
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed before the answer was complete")
        except (Exception, asyncio.CancelledError) as caught:  # noqa: BLE001 - the top of a task
            error = to_report(caught, f"request {record.job.request_id}")
        finally:
            try:
                self._admission.charge_compiling(record.ticket, record.compile_s)
                self._admission.settle(record.ticket, record.service)
            finally:  # the client always gets a terminal status
                record.outbox.close(error)

    async def _serve(self, group: SampleGroup) -> None:
        """Serve a group until its samples have ended, with a new plan after every worker that is lost or leaves.

        Several samples that have begun, here or at another router, are served separately; beams go on together from
        their last known state, with the same outcome, of which the ledger takes what is new.
        """
        ledger = group.record.ledger
        while remaining := ledger.unfinished(group.samples):
            if len(group.samples) > 1 and ledger.num_tokens and not group.record.job.sampling.has_beams:
                await self._serve_apart(group, remaining)
                return
            if group.num_attempts or group.record.job.resumed:  # many may go on at once, as behind a lost worker
                await self._admission.wait_turn(group.record.tenant)
            group.num_attempts += 1
            try:
                outcome = await self._attempt(group)
                if outcome is AttemptOutcome.COMPLETED:
                    return
                group.num_moves += 1
                group.is_set_back = outcome is AttemptOutcome.SET_BACK
                group.num_set_back += group.is_set_back
                self.calls.totals.num_moves += not group.is_set_back
            except AttemptFailed as failure:
                group.is_set_back = False
                if not ledger.unfinished(group.samples):
                    return
                self._raise_if_final(group, failure)
                await self._crash_budget.weigh(group.record, failure.worker, samples=group.samples)
            group.life.advance(State.QUEUED)

    def _raise_if_final(self, group: SampleGroup, failure: AttemptFailed) -> None:
        """Raise the failure's error unless the request may be planned again, which is then counted."""
        error = failure.error
        if not isinstance(error, WorkerError | TransferError):
            raise error
        if group.num_attempts - group.num_moves >= self._config.max_attempts:
            raise error
        reason = type(error).__name__
        extra = {"request_id": group.record.job.request_id, "attempt": group.num_attempts, "reason": reason}
        logger.warning("planning again: %s", failure, extra=extra)
        self.calls.totals.num_replans += 1
        self._metrics.count_replan(reason)

    async def _serve_apart(self, group: SampleGroup, remaining: list[int]) -> None:
        """Serve samples that have begun separately: each continues from its own tokens."""
        groups = [
            replace(
                group,
                samples=range(sample_index, sample_index + 1),
                # The life cycle of the request follows the first sample.
                life=LifeCycle(group.life.request_id, self._clock) if position else group.life,
            )
            for position, sample_index in enumerate(remaining)
        ]
        async with self._tracker.owned(*(self._serve(one) for one in groups)) as tasks:
            await all_or_first_failure(tasks)

    async def _attempt(self, group: SampleGroup) -> AttemptOutcome:
        """Find a plan and run it; after a worker's refusal, queue again. Raises AttemptFailed."""
        wait = self._waits.build(group)
        while True:
            with (
                await self._line.place(wait) as booking,
                self.traces.attempt(group.life, booking.decision) as traceparent,
                self._chooser.decisions.following(booking.decision, attempt=group.num_attempts),
            ):
                self._check_model(group)
                group.record.plan = booking.plan
                if group.num_attempts == 1:
                    block_size = group.record.job.model.block_size
                    group.record.num_evicted_tokens = booking.decision.num_evicted_blocks * block_size
                    num_read_blocks = sum(booking.plan.tier_reads.values()) + booking.decision.num_read_ahead_blocks
                    group.record.num_read_tokens = num_read_blocks * block_size
                if group.record.life.first(State.PREFILLING) is None:
                    group.record.waits += booking.decision.waits
                kind = GenerationAttempt if group.record.job.embedding is None else EmbeddingAttempt
                attempt = kind(group=group, booking=booking, services=self._services, traceparent=traceparent)
                try:
                    with self._chooser.expecting(booking):
                        outcome = await self._run_attempt(group, booking, attempt)
                except AttemptFailed as failure:
                    booking.decision.ended = type(failure.error).__name__
                    if not isinstance(failure.error, Overloaded):
                        self._suspect(group, booking, failure)
                        raise
                    group.life.advance(State.QUEUED)
                    self._metrics.count_refusal(failure.worker.member.endpoint.role)
                    self._chooser.exclude(wait, failure.worker, retry_after_s=failure.error.retry_after_s)
                else:
                    booking.decision.ended = outcome.value
                    for worker in booking.on_workers:
                        self._fleet.note_ended(worker)
                    if outcome is not AttemptOutcome.COMPLETED:
                        self._chooser.retract(booking)
                    return outcome

    async def _run_attempt(self, group: SampleGroup, booking: Booking, attempt: Attempt) -> AttemptOutcome:
        """Run an attempt until it ends or its answer is set back. Raises AttemptFailed."""
        if group.record.job.embedding is not None:
            return await attempt.run()
        booking.number, booking.num_set_back = group.record.ticket.number, group.num_set_back
        booking.count_blocks = lambda: group.num_blocks
        try:
            async with asyncio.timeout(None) as running:
                booking.running = running
                return await attempt.run()
        except TimeoutError:
            if not running.expired():
                raise
            return AttemptOutcome.SET_BACK
        finally:
            booking.running = None

    def _check_model(self, group: SampleGroup) -> None:
        """Raise WorkerLost when the workers now serve another model, which would continue with other tokens."""
        model, now = group.record.job.model, self._fleet.model
        if now is None or now.fingerprint != model.fingerprint:
            raise WorkerLost(f"the workers of model {model.name} ({model.fingerprint}) are gone")

    def _suspect(self, group: SampleGroup, booking: Booking, failure: AttemptFailed) -> None:
        """Take the workers of a failed attempt out of use until they answer again.

        A prefill worker that dies makes the decode worker's call fail as well, possibly first. From its own call until
        the handoff is complete, a failed decode call therefore suspects both, and the network between them.
        """
        if not isinstance(failure.error, WorkerError | TransferError):
            return
        suspects = [failure.worker]
        prefill = booking.prefill
        if prefill is not None and not prefill.has_left:
            group.failed_pairs.add((prefill.life, booking.answering.life))
            if prefill is not failure.worker:
                suspects.append(prefill)
        if not isinstance(failure.error, KvCorrupt):  # both workers were alive: a later end has another reason
            used = [worker.life for worker in booking.on_workers if not worker.has_left]
            group.record.losses.note(used, num_tokens=group.record.num_steps_done, now_s=self._clock.monotonic())
        for worker in suspects:
            self._fleet.note_ended(worker, num_failed=is_failure(failure.error))
            self._fleet.suspect(worker, str(failure))


def _end_now(limit: asyncio.Timeout) -> None:
    """End a request whose client does not read; its outbox has the reason."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
