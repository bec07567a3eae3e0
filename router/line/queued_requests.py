"""The demands of a request on the line: its size and objectives, its longest wait, and its treatment when late."""

import math
from dataclasses import dataclass, field, replace
from functools import partial

from common.block_hash import NO_HASHES
from common.clock import Clock
from common.config import RouterConfig
from common.lifecycle import LifeCycle
from common.pooling import Pooling
from router.choosing.chooser import Search
from router.choosing.shedding import Shed
from router.fleet.fleet import Fleet
from router.fleet.lives import Life
from router.placement.answer_pool import AnswerPool
from router.placement.plans import PlacementRequest
from router.record.account import Service
from router.record.lengths import AnswerLengths
from router.record.record import Job, RunningRequest
from router.record.ticket import QueuedRequest, Ticket
from router.tenants import Overload


@dataclass(slots=True, eq=False, kw_only=True)
class Leg:
    """Samples of a request that are served together."""

    record: RunningRequest
    ticket: Ticket
    samples: range
    life: LifeCycle
    num_attempts: int = 0
    num_moves: int = 0
    """Attempts that ended because their worker was leaving or the answer was set back; nothing had failed."""
    num_set_back: int = 0
    is_set_back: bool = False
    """Whether the last attempt ended so."""
    failed_pairs: set[tuple[Life, Life]] = field(default_factory=set)
    """Lives of the prefill and decode workers of the attempts that failed before the handoff was complete."""

    @property
    def num_blocks(self) -> int:
        """Pages that its samples fill: they share those of the prompt."""
        job, lengths = self.record.job, self.record.ledger.lengths
        num_tokens = len(job.prompt_token_ids) + sum(lengths[index] for index in self.samples)
        return num_tokens // job.model.block_size + len(self.samples)


class QueuedRequestBuilder:
    """Makes the requests that wait in line. Event loop only."""

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

    def build(self, leg: Leg) -> QueuedRequest:
        """Return the request with which a leg waits for its next plan."""
        job = leg.record.job
        output = leg.record.output_of(leg.samples)
        # Prompt log-probabilities and means need every position computed: cached KV has none.
        wants_prompt = job.sampling.num_prompt_logprobs is not None and not leg.record.ledger.has_prompt_logprobs
        wants_prompt |= job.embedding is not None and job.embedding.pooling is Pooling.MEAN
        is_first = leg.num_attempts == 1
        patience_s = self._config.queue_timeout_s if is_first else self._config.recovery_timeout_s
        if leg.record.losses.is_quarantined or leg.is_set_back:  # others may have to end before it
            patience_s = leg.record.deadline_s - self._clock.monotonic()
        terms = leg.ticket.terms
        num_tokens = len(job.prompt_token_ids) + len(output)
        tpot_slo_s = math.inf
        if job.embedding is None:
            num_samples = len(leg.samples)
            tpot_slo_s = self._fleet.timing.tpot_objective_s(
                terms.tpot_slo_s, num_samples=num_samples, num_tokens=num_tokens
            )
        request = PlacementRequest(
            request_id=job.request_id,
            num_tokens=num_tokens,
            num_samples=len(leg.samples),
            block_size=job.model.block_size,
            tenant=leg.ticket.account.tenant,
            hashes=NO_HASHES if wants_prompt else job.hashes(output),
            num_output_tokens=self._rest_of_answer(leg, num_done=len(output)),
            typical_output_tokens=self._lengths.typical_tokens,
            received_s=leg.record.life.received_s,
            deadline_s=leg.record.deadline_s,
            ttft_slo_s=terms.ttft_objective_s(len(job.prompt_token_ids)),
            tpot_slo_s=tpot_slo_s,
            has_begun=leg.record.ledger.num_tokens > 0,
            pool=AnswerPool.DECODE if job.embedding is None else AnswerPool.PREFILL,
            is_quarantined=leg.record.losses.is_quarantined,
        )
        queued = QueuedRequest(
            ticket=leg.ticket,
            search=Search(request=request, failed_pairs=leg.failed_pairs),
            deadline_s=self._clock.monotonic() + patience_s,
            is_set_back=leg.is_set_back,
            on_waiting=leg.record.tell_queued,
        )
        if is_first:
            _set_overload(queued, leg.record, Shed(self._config.shed))
        return queued

    def _rest_of_answer(self, leg: Leg, *, num_done: int) -> int:
        """Return the expected number of tokens that each answer has behind `num_done`."""
        job, ticket = leg.record.job, leg.ticket
        if not num_done and leg.num_attempts == 1:  # forecast when its size was counted, a moment ago
            return ticket.expected.num_output_tokens // job.sampling.n
        return self._expected_tokens(job, ticket.account.tenant.name, num_done=num_done)

    def _expected_tokens(self, job: Job, tenant: str, *, num_done: int = 0) -> int:
        """Return the expected length of each answer, or of its rest behind `num_done` tokens."""
        if job.embedding is not None:
            return 0
        return self._lengths.expect(job, tenant, num_done=num_done).num_tokens


def _set_overload(queued: QueuedRequest, record: RunningRequest, configured: Shed) -> None:
    """Set what happens to a new request that is late or will be."""
    tenant, search = queued.ticket.account.tenant, queued.search

    def relax(max_tokens: int | None = None) -> None:
        search.shed = Shed.DEADLINE if configured is Shed.SLO else configured
        # A resumed answer keeps the limit that its client was sent.
        if max_tokens is not None and not record.job.resumed:
            record.shorten(max_tokens)
            num_output_tokens = min(search.request.num_output_tokens, record.job.sampling.max_tokens)
            search.request = replace(search.request, num_output_tokens=num_output_tokens)

    match tenant.overload:
        case None:
            search.shed = configured
        case Overload.REFUSE:
            search.shed = Shed.SLO
        case Overload.WAIT:
            queued.deadline_s = record.deadline_s
        case Overload.SHORTEN:
            search.shed = Shed.SLO
            queued.on_late = partial(relax, tenant.shortened_max_tokens)
        case Overload.YIELD:
            search.shed, queued.deadline_s = Shed.SLO, record.deadline_s
            queued.on_late = relax
