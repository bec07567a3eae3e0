"""The demands of a request on the line: its size and objectives, its longest wait, and its treatment when late."""

import math
from dataclasses import replace
from functools import partial

from common.block_hash import NO_HASHES
from common.clock import Clock
from common.config import RouterConfig
from common.pooling import Pooling
from router.choosing.shedding import Shed
from router.fleet.fleet import Fleet
from router.line.wait import Standing, Wait
from router.placement.answer_pool import AnswerPool
from router.placement.plans import PlacementRequest
from router.record.account import Service
from router.record.lengths import AnswerLengths
from router.record.record import Job, RunningRequest
from router.requests.sample_group import SampleGroup
from router.tenants import Overload


class WaitBuilder:
    """Makes the waits of requests for their plans. Event loop only."""

    def __init__(self, *, fleet: Fleet, lengths: AnswerLengths, clock: Clock, config: RouterConfig) -> None:
        """`lengths` are those of earlier answers."""
        self._fleet = fleet
        self._lengths = lengths
        self._clock = clock
        self._config = config

    def expected_service(self, job: Job, tenant: str) -> Service:
        """Return what a job will probably cost: all its answers are as long as earlier ones."""
        output = self._expected_tokens(job, tenant) * job.sampling.n
        return Service(num_prompt_tokens=len(job.prompt_token_ids), num_output_tokens=output)

    def build(self, group: SampleGroup) -> Wait:
        """Return the wait of a group for its next plan."""
        record, ticket = group.record, group.record.ticket
        job = record.job
        output = record.output_of(group.samples)
        # Prompt log-probabilities and means need every position computed: cached KV has none.
        wants_prompt = job.sampling.num_prompt_logprobs is not None and not record.ledger.has_prompt_logprobs
        wants_prompt |= job.embedding is not None and job.embedding.pooling is Pooling.MEAN
        is_first = group.num_attempts == 1
        patience_s = self._config.queue_timeout_s if is_first else self._config.recovery_timeout_s
        patience_ends_s = self._clock.monotonic() + patience_s
        if record.losses.is_quarantined or group.is_set_back:  # others may have to end before it
            patience_ends_s = record.life.deadline_s
        terms = ticket.terms
        num_tokens = len(job.prompt_token_ids) + len(output)
        tpot_slo_s = math.inf
        if job.embedding is None:
            num_samples = len(group.samples)
            tpot_slo_s = self._fleet.timing.tpot_objective_s(
                terms.tpot_slo_s, num_samples=num_samples, num_tokens=num_tokens
            )
        request = PlacementRequest(
            request_id=job.request_id,
            num_tokens=num_tokens,
            num_samples=len(group.samples),
            block_size=job.model.block_size,
            tenant=record.tenant,
            hashes=NO_HASHES if wants_prompt else job.hashes(output),
            num_output_tokens=self._rest_of_answer(group, num_done=len(output)),
            typical_output_tokens=self._lengths.typical_tokens,
            received_s=record.life.received_s,
            deadline_s=record.life.deadline_s,
            ttft_slo_s=terms.ttft_objective_s(len(job.prompt_token_ids)),
            tpot_slo_s=tpot_slo_s,
            has_begun=record.ledger.num_tokens > 0,
            pool=AnswerPool.DECODE if job.embedding is None else AnswerPool.PREFILL,
            is_quarantined=record.losses.is_quarantined,
        )
        wait = Wait(
            ticket=ticket,
            request=request,
            root=job.model.root,
            patience_ends_s=patience_ends_s,
            standing=Standing.of(ticket, is_set_back=group.is_set_back),
            failed_pairs=group.failed_pairs,
            on_waiting=record.send_queued,
        )
        if is_first:
            _set_overload(wait, record, Shed(self._config.shed))
        return wait

    def _rest_of_answer(self, group: SampleGroup, *, num_done: int) -> int:
        """Return the expected number of tokens that each answer has behind `num_done`."""
        record = group.record
        if not num_done and group.num_attempts == 1:  # forecast when its size was counted, a moment ago
            return record.ticket.expected.num_output_tokens // record.job.sampling.n
        return self._expected_tokens(record.job, record.tenant.name, num_done=num_done)

    def _expected_tokens(self, job: Job, tenant: str, *, num_done: int = 0) -> int:
        """Return the expected length of each answer, or of its rest behind `num_done` tokens."""
        if job.embedding is not None:
            return 0
        return self._lengths.expect(job, tenant, num_done=num_done).num_tokens


def _set_overload(wait: Wait, record: RunningRequest, configured: Shed) -> None:
    """Set what happens to a new request that is late or will be."""
    tenant = record.tenant

    def relax(max_tokens: int | None = None) -> None:
        wait.shed = Shed.DEADLINE if configured is Shed.SLO else configured
        # A resumed answer keeps the limit that its client was sent.
        if max_tokens is not None and not record.job.resumed:
            record.shorten(max_tokens)
            num_output_tokens = min(wait.request.num_output_tokens, record.job.sampling.max_tokens)
            wait.request = replace(wait.request, num_output_tokens=num_output_tokens)

    match tenant.overload:
        case None:
            wait.shed = configured
        case Overload.REFUSE:
            wait.shed = Shed.SLO
        case Overload.WAIT:
            wait.patience_ends_s = record.life.deadline_s
        case Overload.SHORTEN:
            wait.shed = Shed.SLO
            wait.on_late = partial(relax, tenant.shortened_max_tokens)
        case Overload.YIELD:
            wait.shed, wait.patience_ends_s = Shed.SLO, record.life.deadline_s
            wait.on_late = relax
