"""Turns the results of a step into tokens of samples, events, and the end of samples."""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from common.clock import Clock
from common.wire_names import FinishReason
from engine.events import DraftCounts, PrefillProgress, TokenOutput
from engine.executor import Sampled, ScheduledSequence, StepResult
from engine.sequence import MAX_FORCED_TOKENS, Sequence, SequenceState
from engine.steps.beam_groups import BeamGroups
from engine.steps.group import Emitted, Group, Groups
from engine.steps.plan import StepPlan
from engine.steps.scheduler import Scheduler


class OutputProcessor:
    """Processes completed steps of one core. Engine thread only."""

    def __init__(
        self, scheduler: Scheduler, groups: Groups, beams: BeamGroups, clock: Clock, *, eos_token_ids: Collection[int]
    ) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._beams = beams
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._num_forced_left = 0
        """Tokens that may still be forced behind the step whose results are processed."""

    def process(self, plan: StepPlan, results: Seq[StepResult]) -> Emitted:
        """Append the tokens of a completed step to their sequences, and end samples. Returns the events."""
        self._num_forced_left = MAX_FORCED_TOKENS
        emitted: Emitted = []
        tokens: dict[Group, list[TokenOutput]] = {}
        for item, result in zip(plan.batch.values(), results, strict=True):
            if item.sequence.state is SequenceState.RUNNING:  # else it ended in the meantime
                self._process_one(item, result, tokens, emitted)
        now_s = self._clock.monotonic()
        emitted.extend((group, group.tokens_event(outputs, now_s)) for group, outputs in tokens.items())
        return emitted

    def _process_one(
        self, item: ScheduledSequence, result: StepResult, tokens: dict[Group, list[TokenOutput]], emitted: Emitted
    ) -> None:
        """Process one running sequence's result: adds to the step's tokens and other events."""
        sequence = item.sequence
        group = self._groups[sequence]
        if sequence.num_output_tokens == 0:  # else they were sent before a preemption, or by another worker
            group.prompt_logprobs.extend(result.prompt_logprobs)
        if group.request.pooling is not None:
            group.add_pooled(result.pooled)
            if sequence.num_ready == sequence.num_tokens:
                emitted.append((group, group.embedded_event(self._clock.monotonic())))
                self._groups.finish(sequence)
            return
        if group.holds_after_prefill:
            progress = PrefillProgress(
                num_computed_tokens=sequence.num_ready,
                block_table=sequence.block_ids(),
                windows=self._scheduler.pages.windows.ids_of(sequence.block_table, sequence.window_blocks),
            )
            emitted.append((group, progress))
        if item.num_samples == 0 or item.is_overtaken:
            return
        if group.holds_after_prefill:
            # The worker that decodes has its own look at the last token before beams.
            first = () if sequence.request.sampling.has_beams else result.sampled
            tokens[group] = [self._output(sequence, sequence.sample_index + j, each) for j, each in enumerate(first)]
            self._scheduler.hold(sequence)
            return
        if group.beams is not None:
            emitted.extend((group, event) for event in self._beams.take(group, group.beams, sequence, *result.sampled))
            return
        outputs = tokens.setdefault(group, [])
        if item.draft:
            appended = self._append(sequence, result.sampled)
            # One token belongs to the step itself. Right tokens after the end are not part of the answer.
            group.drafts += DraftCounts(item.num_drafted, min(result.num_accepted, len(appended) - 1))
            outputs += appended
            return
        samples = self._groups.samples(sequence, item.num_samples)
        for sample, sampled in zip(samples, result.sampled, strict=True):
            outputs += self._append(sample, [sampled])

    def _append(self, sequence: Sequence, sampled: Seq[Sampled]) -> list[TokenOutput]:
        """Append sampled tokens, up to one that ends the sample, and those that a grammar forces behind them.

        Returns their outputs.
        """
        outputs: list[TokenOutput] = []
        for each in sampled:
            outputs.append(self._output(sequence, sequence.sample_index, each))
            sequence.append_token(each.token_id)
            if outputs[-1].finish_reason is not None:
                self._groups.finish(sequence)
                return outputs
        if sequence.request.grammar is not None:
            outputs += self._fast_forward(sequence)
        return outputs

    def _fast_forward(self, sequence: Sequence) -> list[TokenOutput]:
        """Append the tokens that a grammar forces, which need no step of their own; returns their outputs.

        They are the tokens that steps would sample. Log-probabilities need the model's look at each position.
        """
        outputs: list[TokenOutput] = []
        if sequence.request.sampling.num_logprobs is not None:
            return outputs
        while self._num_forced_left and (token_id := sequence.forced_token()) is not None:
            self._num_forced_left -= 1
            outputs.append(self._output(sequence, sequence.sample_index, Sampled(token_id=token_id)))
            sequence.force_token(token_id)
            if outputs[-1].finish_reason is not None:
                self._groups.finish(sequence)
                break
        return outputs

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
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            # A grammar that exceeds its limits cuts the answer, which must not look finished.
            return FinishReason.LENGTH if sequence.is_cut else FinishReason.STOP
        if sequence.num_tokens + 1 >= sequence.max_num_tokens:
            return FinishReason.LENGTH
        return None
