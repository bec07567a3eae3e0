"""One request in the router: what was asked, what was delivered, what the workers reported."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.block_hash import BlockHashes, hash_blocks
from common.clock import Clock
from common.ids import RequestId, WorkerId
from common.lifecycle import LifeCycle, State
from common.pooling import pooling_to_proto
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens, num_packed
from common.wire import message_of, pack_tokens, sampling_to_proto
from kvrelay.v1 import decode_pb2, inference_pb2, sampling_pb2, sequence_pb2, worker_pb2
from router.fleet.decisions import forecast_to_proto
from router.fleet.facts import ModelFacts
from router.placement.calibration import DurationForecast
from router.placement.plans import Plan
from router.placement.waits import NO_WAITS, Waits
from router.record.account import Service
from router.record.cache_use import PromptMark, cache_pins, cache_writes
from router.record.crash_budget import Losses
from router.record.demand import Answered
from router.record.embedding import EmbeddingForm, Floats
from router.record.ledger import TokenLedger
from router.record.outbox import Outbox
from router.record.resumption import ResumedSample
from router.record.sessions import Session
from router.record.ticket import Ticket
from router.tenants import Tenant


class Delivery(enum.Enum):
    """The sender of a client's tokens."""

    ROUTER = "router"
    DIRECT = "direct"
    """The decode worker; the router keeps checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that passed every check."""

    request_id: RequestId
    prompt_token_ids: TokenArray
    prompt_hashes: BlockHashes
    """Hashes of the prompt's full blocks."""
    sampling: SamplingParams
    model: ModelFacts
    defaults: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """Values in `sampling` that the router chose, for fields that the request left out."""
    delivery: Delivery = Delivery.ROUTER
    rendered_unix_s: int = 0
    """Time that the chat template was given; 0: no chat."""
    answer_format: inference_pb2.AnswerFormat | None = None
    """How the text of the answer to a chat is read; None: no chat."""
    is_parsed: bool = False
    """Whether the client wants message deltas beside the text."""
    session_name: str = ""
    """Name of its session, where the client gives one."""
    embedding: EmbeddingForm | None = None
    """Set when the answer is an embedding of the prompt; nothing is sampled then."""
    marks: tuple[PromptMark, ...] = ()
    """Prefixes of the prompt that are to stay cached, shortest first."""
    resumed: tuple[ResumedSample, ...] = ()
    """The first samples as another router has delivered them; empty for a new request."""

    def hashes(self, output: TokenArray) -> BlockHashes:
        """Return the hashes of the full blocks of prompt and output, without hashing the prompt again."""
        if not output:
            return self.prompt_hashes
        num_hashed = len(self.prompt_hashes)
        parent = self.prompt_hashes[-1] if num_hashed else self.model.root
        rest = self.prompt_token_ids[num_hashed * self.model.block_size :] + output
        return self.prompt_hashes + hash_blocks(rest, root=parent, block_size=self.model.block_size)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """The state of one running request. Event loop only."""

    job: Job
    ticket: Ticket
    life: LifeCycle
    clock: Clock
    outbox: Outbox = field(default_factory=Outbox)
    ledger: TokenLedger = field(init=False)
    shortened_max_tokens: int | None = None
    """Longest answer when overload has made it shorter than the request asks for."""
    num_cached_tokens: int = 0
    num_found_on: dict[WorkerId, int] = field(default_factory=dict)
    """Tokens that each worker had cached when it first began to compute the prompt."""
    num_evicted_tokens: int = 0
    """Prompt tokens that caches had held and had evicted when the request was first planned."""
    num_read_tokens: int = 0
    """Prompt tokens that its first plan reads from tiers, or that were read from there while it waited."""
    waits: Waits = NO_WAITS
    """Waits in line before its prefill."""
    num_pulled_tokens: int = 0
    num_decode_cached_tokens: int = 0
    num_pinned_tokens: int = 0
    """Leading tokens that its marks have pinned on the worker where these are most."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_s: float = 0.0
    compile_s: float = 0.0
    """CPU time of workers that compiled grammars for this request, or for earlier ones of its tenant that have left."""
    num_attempts: int = 0
    plan: Plan | None = None
    """The latest plan; None before the first one."""
    beams: sequence_pb2.BeamState | None = None
    """Last known state of a beam search, from which a worker may go on."""
    session: Session | None = None
    """Its session; None: an embedding has none."""
    ends_in_calls: bool = False
    """Whether its answer has ended with calls of tools, as the door that reads its text has found."""
    losses: Losses = field(default_factory=Losses)
    transfer: worker_pb2.TransferStats = field(default_factory=worker_pb2.TransferStats)

    def __post_init__(self) -> None:
        self.ledger = TokenLedger(num_samples=self.job.sampling.n, clock=self.clock)
        for index, sample in enumerate(self.job.resumed):
            self.ledger.resume(index, sample.token_ids)
            if sample.is_finished:
                self.ledger.finish(index)

    @property
    def tenant(self) -> Tenant:
        """Owner of the request."""
        return self.ticket.account.tenant

    def send_queued(self, ttft_forecast: DurationForecast | None) -> None:
        """Report to the client that the request waits in line."""
        queued = inference_pb2.Queued(ttft_forecast=forecast_to_proto(ttft_forecast))
        self.outbox.put(inference_pb2.GenerateResponse(queued=queued))

    def shorten(self, max_tokens: int) -> None:
        """Lower the limit of the answer's length, before any token; the client learns it with the plan."""
        sampling = self.job.sampling
        max_tokens = max(max_tokens, sampling.min_tokens)
        if max_tokens < sampling.max_tokens:
            self.shortened_max_tokens = max_tokens
            self.job = replace(self.job, sampling=replace(sampling, max_tokens=max_tokens))

    def output_of(self, samples: range) -> TokenArray:
        """Return the tokens that a worker continues from; none when several samples begin together.

        The client of a direct answer may miss tokens that the router knows. The next worker repeats them, but cannot
        repeat their log-probabilities without computing the tokens again.
        """
        if len(samples) > 1:
            return as_tokens(())
        index, job = samples[0], self.job
        if job.delivery is Delivery.DIRECT and job.sampling.num_logprobs is not None:
            return job.resumed[index].token_ids[:] if index < len(job.resumed) else as_tokens(())
        return self.ledger.output(index)

    def sequence(
        self,
        samples: range,
        retention: "sequence_pb2.Retention.ValueType" = sequence_pb2.RETENTION_UNSPECIFIED,
        *,
        tpot_slo_s: float = math.inf,
        prefill_booking: sequence_pb2.PrefillBooking | None = None,
        traceparent: str = "",
    ) -> sequence_pb2.SequenceSpec:
        """Return the specification with which a worker begins the samples or continues a single one."""
        output = self.output_of(samples)
        sampling = replace(self.job.sampling, n=len(samples))
        if self.ledger.has_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return sequence_pb2.SequenceSpec(
            request_id=self.job.request_id,
            prompt_tokens=pack_tokens(self.job.prompt_token_ids),
            output_tokens=pack_tokens(output),
            hash_root=self.job.model.root,
            sampling=sampling_to_proto(sampling),
            first_sample_index=samples[0],
            retention=retention,
            tpot_slo_s=None if tpot_slo_s == math.inf else tpot_slo_s,
            prefill_booking=prefill_booking,
            quarantined=self.losses.is_quarantined,
            traceparent=traceparent,
            cache_pins=self._cache_pins(is_kept=retention == sequence_pb2.RETENTION_UNSPECIFIED),
            pooling=pooling_to_proto(None if self.job.embedding is None else self.job.embedding.pooling),
            answer_format=self.job.answer_format if sampling.stop else None,
        )

    def _cache_pins(self, *, is_kept: bool) -> sequence_pb2.CachePins | None:
        """Return the marks for a worker that keeps the blocks; another one only renews the pins that it finds."""
        if self.job.embedding is not None:
            return None
        return cache_pins(self.job.marks if is_kept else (), tenant=self.tenant.name, max_bytes=self.tenant.cache_bytes)

    def note_pinned(self, num_pinned_tokens: int) -> None:
        """Note the leading tokens that a worker has pinned."""
        self.num_pinned_tokens = max(self.num_pinned_tokens, num_pinned_tokens)

    @property
    def cache_writes(self) -> list[inference_pb2.CacheWrite]:
        """Tokens that it has put into the cache for its marks, by their time, once the prompt is computed."""
        if not self.ledger.has_tokens:
            return []
        return list(cache_writes(self.job.marks, num_cached_tokens=self.num_cached_tokens))

    @property
    def num_refused_pin_tokens(self) -> int:
        """Tokens that its marks could not pin, once the prompt is computed."""
        if not self.job.marks or not self.ledger.has_tokens:
            return 0
        return max(0, self.job.marks[-1].num_tokens - self.num_pinned_tokens)

    def deliver(
        self,
        batch: decode_pb2.TokenBatch,
        *,
        expected: range,
        prompt_logprobs: Sequence[sampling_pb2.PositionLogprobs] = (),
    ) -> bool:
        """Send the new tokens to the client and return whether they end a sample.

        `prompt_logprobs`: those that came beside the batch rather than in it. Raises EngineFault for tokens that cannot
        follow.
        """
        ledger = self.ledger
        num_finished = ledger.num_finished
        tokens = ledger.accept(batch.tokens, expected=expected) if batch.tokens else ()
        runs = ledger.accept_runs(batch.runs, expected=expected) if batch.runs else ()
        prompt_logprobs = () if ledger.has_prompt_logprobs else prompt_logprobs or batch.prompt_logprobs
        ledger.has_prompt_logprobs |= bool(prompt_logprobs)
        if tokens or runs:
            self.outbox.put_tokens(tokens, runs, prompt_logprobs)
        return ledger.num_finished > num_finished

    def deliver_embedding(self, pooled: Floats) -> None:
        """End the request with its embedding, made of a worker's pooled hidden states."""
        assert self.job.embedding is not None, "a request for tokens gets no embedding"
        self.outbox.embedding = self.job.embedding.apply(pooled)
        self.ledger.end_without_tokens()

    def note_checkpoint(self, batch: decode_pb2.TokenBatch, *, expected: range) -> bool:
        """Remember tokens that the client gets from the worker itself. Returns and raises like `deliver`."""
        num_finished = self.ledger.num_finished
        self.ledger.accept_runs(batch.runs, expected=expected)
        return self.ledger.num_finished > num_finished

    def add_transfer(self, stats: worker_pb2.TransferStats) -> None:
        """Add the statistics of a handoff."""
        self.transfer.num_blocks += stats.num_blocks
        self.transfer.kv_bytes += stats.kv_bytes
        self.transfer.transfer_s += stats.transfer_s
        self.transfer.exposed_s += stats.exposed_s
        self.transfer.transport = stats.transport

    @property
    def num_steps_done(self) -> int:
        """Steps that no sample repeats in a new attempt: the tokens of the shortest unfinished one, or of a beam."""
        beam = self.beams.live[0].tokens if self.beams is not None else b""
        lengths = self.ledger.lengths
        shortest = min((lengths[index] for index in self.ledger.unfinished(range(len(lengths)))), default=0)
        return shortest + num_packed(beam)

    @property
    def service(self) -> Service:
        """Tokens that the request got so far; the prompt counts once its computation has begun."""
        has_begun = self.life.first(State.PREFILLING) is not None
        return Service(
            num_prompt_tokens=len(self.job.prompt_token_ids) if has_begun else 0,
            num_cached_tokens=self.num_cached_tokens if has_begun else 0,
            num_output_tokens=self.ledger.num_tokens,
            num_samples=self.job.sampling.n,
            num_pinned_tokens=self.num_pinned_tokens,
            num_refused_pin_tokens=self.num_refused_pin_tokens,
        )

    @property
    def usage(self) -> inference_pb2.Usage:
        """Token counts so far."""
        num_prompt_tokens, num_output_tokens = len(self.job.prompt_token_ids), self.ledger.num_tokens
        return message_of(
            inference_pb2.Usage, self, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens
        )

    @property
    def timings(self) -> inference_pb2.RequestTimings:
        """Durations, each a difference of stamps or a worker's report."""
        received_s = self.life.received_s
        started_s = self.life.first(State.PREFILLING)
        gaps = self.ledger.gaps
        return inference_pb2.RequestTimings(
            queue_s=0.0 if started_s is None else started_s - received_s,
            prefill_s=self.prefill_s,
            transfer_s=self.transfer.transfer_s,
            transfer_exposed_s=self.transfer.exposed_s,
            ttft_s=0.0 if self.ledger.first_token_s is None else self.ledger.first_token_s - received_s,
            tpot_s=self.ledger.mean_gap_s() or 0.0,
            max_itl_s=max((gap_s for gap_s, _ in gaps), default=0.0),
            e2e_s=0.0 if self.ledger.last_token_s is None else self.ledger.last_token_s - received_s,
        )

    @property
    def answered(self) -> Answered:
        """Sizes and times of the request after a complete answer."""
        ledger, num_prompt_tokens = self.ledger, len(self.job.prompt_token_ids)
        num_computed_tokens = max(0, num_prompt_tokens - self.num_cached_tokens)
        return Answered(
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            num_read_tokens=min(self.num_read_tokens, num_prompt_tokens - num_computed_tokens),
            num_evicted_tokens=min(self.num_evicted_tokens, num_computed_tokens),
            num_output_tokens=ledger.num_tokens // self.job.sampling.n,
            ttft_s=None if ledger.first_token_s is None else ledger.first_token_s - self.life.received_s,
            tpot_s=ledger.mean_gap_s(),
        )

    @property
    def completed(self) -> inference_pb2.Completed:
        """The terminal message."""
        return message_of(inference_pb2.Completed, self, seed=self.job.sampling.seed)
