"""One engine: requests in, events out, one step at a time. No threads, no clock of its own, no network."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.clock import Clock
from common.errors import EngineFault, PromptTooLong, Refused
from engine.block_pool import BlockPool
from engine.events import EngineEvent, Failed, FinishReason, Load, Progress, Started, TokenOutput, Tokens
from engine.executor import Executor, Sampled, ScheduledSequence, StepResult
from engine.group import Group, Sink
from engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from engine.sequence import EngineRequest, Sequence, SequenceState

logger = logging.getLogger(__name__)

Emitted = list[tuple[Group, EngineEvent]]


class EngineCore:
    """Bookkeeping around an executor. Engine thread only; every method returns between two steps."""

    def __init__(self, executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
        self.executor = executor
        self.pool = BlockPool(executor.kv.num_blocks)
        self.scheduler = Scheduler(self.pool, limits)
        self._clock = clock
        self._groups: dict[Sequence, Group] = {}
        self._next_order = 0
        self._is_stalled = False
        self._plan = StepPlan()

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something: there are sequences, and the last step was not in vain."""
        return self.scheduler.has_work and not self._is_stalled

    def wake(self) -> None:
        """A command has run: what waits for pages may fit now."""
        self._is_stalled = False

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """Put a request in line: prefill here, then decode. Raises PromptTooLong when it can never fit."""
        self._check_fits(request, num_new_tokens=request.sampling.max_tokens)
        return self._enter(Group.of(request, sink, self._clock.monotonic()), self.scheduler.add)

    def add_prefill_only(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """Put a request in line for prompt and first tokens; its pages stay until `cancel`. Raises PromptTooLong."""
        self._check_fits(request, num_new_tokens=0)
        group = Group.of(request, sink, self._clock.monotonic())
        group.holds_after_prefill = True
        return self._enter(group, self.scheduler.add)

    def reserve(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """Grant pages for a request whose KV will be pulled. Raises PromptTooLong."""
        self._check_fits(request, num_new_tokens=request.sampling.max_tokens)
        return self._enter(Group.of(request, sink, self._clock.monotonic()), self.scheduler.reserve)

    def commit(self, group: Group, num_tokens: int) -> None:
        """The first `num_tokens` tokens' KV of a reservation is in its pages, verified."""
        if group.leader.state is SequenceState.RESERVED:
            self.scheduler.commit(group.leader, num_tokens)

    def start(self, group: Group, first_tokens: Seq[tuple[int, bool]]) -> None:
        """Decode a filled reservation. `first_tokens`: (token id, finished) of each sample, in sample order."""
        leader = group.leader
        if leader.state is not SequenceState.RESERVED:
            return  # cancelled meanwhile
        assert len(first_tokens) == leader.num_samples, (
            f"{len(first_tokens)} first tokens, {leader.num_samples} samples"
        )
        self.scheduler.start(leader)
        self._fork(group, len(first_tokens) - 1)
        for sequence, (token_id, finished) in zip(list(group.sequences), first_tokens, strict=True):
            sequence.append_token(token_id)
            if finished:
                self._finish(sequence)

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """End one sample from outside: its text reached a stop string."""
        for sequence in group.sequences:
            if sequence.sample_index == sample_index:
                self._finish(sequence)

    def cancel(self, group: Group) -> None:
        """Free everything that a request holds, in whatever state. Harmless when it is over."""
        for sequence in group.sequences:
            self._finish(sequence)

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> Emitted:
        """Run one whole step."""
        return self.begin_step() + self.finish_step()

    def begin_step(self) -> Emitted:
        """Plan the next step; the events of requests that it starts can go out before it is computed."""
        self._plan = self.scheduler.schedule()
        self._is_stalled = not self._plan.batch
        emitted: Emitted = []
        for sequence in self._plan.admitted:
            self._started(sequence, emitted)
        return emitted

    def finish_step(self) -> Emitted:
        """Compute what was planned. A fault of the executor ends the requests of that step, not the engine."""
        plan, self._plan = self._plan, StepPlan()
        emitted: Emitted = []
        if not plan.batch:
            return emitted
        batch = list(plan.batch.values())
        try:
            for source, target in plan.copies:
                self.executor.kv.copy_block(source, target)
            results = self.executor.execute(batch)
        except Exception as error:  # the top of a step: whatever the arithmetic raises belongs to this batch
            logger.exception("engine step failed", extra={"requests": [i.sequence.request.request_id for i in batch]})
            return emitted + self._fail(plan, EngineFault(f"engine step failed: {type(error).__name__}: {error}"))
        self.scheduler.complete(plan)
        tokens: dict[Group, list[TokenOutput]] = {}
        for item, result in zip(batch, results, strict=True):
            self._take(item, result, tokens, emitted)
        emitted.extend((group, self._tokens_event(group, outputs)) for group, outputs in tokens.items())
        return emitted

    def load(self) -> Load:
        """Return the load at this moment."""
        scheduler, pool = self.scheduler, self.pool
        active = (*scheduler.running, *scheduler.waiting)
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_reserved=len(scheduler.reserved),
            num_held=len(scheduler.held),
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_blocks=pool.num_blocks,
            num_pending_prefill_tokens=sum(s.num_tokens - s.num_computed for s in active if s.num_output_tokens == 0),
            num_context_tokens=sum(s.num_computed for s in scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_computed_tokens=scheduler.num_computed_tokens,
        )

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, group: Group, enter: Callable[[Sequence], Refused | None]) -> Group | Refused:
        leader = Sequence.from_request(
            group.request, block_size=self.scheduler.limits.block_size, order=self._next_order
        )
        self._next_order += 1
        refused = enter(leader)
        if refused is not None:
            return refused
        group.sequences.append(leader)
        self._groups[leader] = group
        return group

    def _check_fits(self, request: EngineRequest, *, num_new_tokens: int) -> None:
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_known >= self.executor.max_model_len:
            raise PromptTooLong(
                f"prompt has {num_known} tokens; this model takes {self.executor.max_model_len - 1}", field="prompt"
            )
        most = min(max(num_known, len(request.prompt_token_ids) + num_new_tokens), self.executor.max_model_len)
        num_blocks = self.scheduler.num_blocks_for(most)
        if num_blocks > self.pool.num_blocks:
            raise PromptTooLong(
                f"{most} tokens need {num_blocks} KV blocks; this worker has {self.pool.num_blocks}", field="prompt"
            )

    def _started(self, sequence: Sequence, emitted: Emitted) -> None:
        group = self._groups[sequence]
        group.prompt_logprobs.clear()  # a prompt that was preempted half-way is told from its beginning again
        if group.prefill_started_s is None:
            group.prefill_started_s = self._clock.monotonic()
            queue_s = group.prefill_started_s - group.queued_s
            emitted.append((group, Started(num_cached_tokens=sequence.num_cached, queue_s=queue_s)))

    def _take(
        self, item: ScheduledSequence, result: StepResult, tokens: dict[Group, list[TokenOutput]], emitted: Emitted
    ) -> None:
        """Turn one sequence's step result into events and follow-up state."""
        sequence = item.sequence
        group = self._groups[sequence]
        if sequence.num_output_tokens == 0:  # else they were told before a preemption, or by another worker
            group.prompt_logprobs.extend(result.prompt_logprobs)
        if group.holds_after_prefill:
            emitted.append(
                (group, Progress(num_computed_tokens=sequence.num_computed, block_table=tuple(sequence.block_table)))
            )
        if item.num_samples == 0:
            return
        if group.holds_after_prefill:
            tokens[group] = [
                self._output(sequence, sequence.sample_index + j, sampled) for j, sampled in enumerate(result.sampled)
            ]
            self.scheduler.hold(sequence)
            return
        samples = [sequence, *self._fork(group, item.num_samples - 1)]
        for sample, sampled in zip(samples, result.sampled, strict=True):
            output = self._output(sample, sample.sample_index, sampled)
            sample.append_token(sampled.token_id)
            tokens.setdefault(group, []).append(output)
            if output.finish_reason is not None:
                self._finish(sample)

    def _output(self, sequence: Sequence, sample_index: int, sampled: Sampled) -> TokenOutput:
        """Return the output for a token that is about to be appended to `sequence`."""
        return TokenOutput(
            sample_index=sample_index,
            token_index=sequence.num_output_tokens,
            token_id=sampled.token_id,
            logprobs=sampled.logprobs,
            finish_reason=self._finish_reason(sequence, sampled.token_id),
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.executor.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if sequence.num_output_tokens + 1 >= sampling.max_tokens:
            return FinishReason.LENGTH
        if sequence.num_tokens + 1 >= self.executor.max_model_len:
            return FinishReason.LENGTH
        return None

    def _tokens_event(self, group: Group, outputs: list[TokenOutput]) -> Tokens:
        """Return the event; the first one of a prompt computed here tells the prefill time."""
        prefill_s = None
        if not group.reported_prefill and group.prefill_started_s is not None:
            group.reported_prefill = True
            prefill_s = self._clock.monotonic() - group.prefill_started_s
        prompt_logprobs, group.prompt_logprobs = tuple(group.prompt_logprobs), []
        return Tokens(tokens=tuple(outputs), prompt_logprobs=prompt_logprobs, prefill_s=prefill_s)

    def _fork(self, group: Group, num_children: int) -> list[Sequence]:
        children = self.scheduler.fork(group.leader, num_children)
        for child in children:
            group.sequences.append(child)
            self._groups[child] = group
        return children

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._groups.pop(sequence, None)

    def _fail(self, plan: StepPlan, error: EngineFault) -> Emitted:
        groups = {self._groups[sequence]: None for sequence in plan.batch}
        for group in groups:
            self.cancel(group)
        return [(group, Failed(error=error)) for group in groups]
