"""Requests inside one engine: their samples and the sinks of their events."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from common.errors import EngineFault
from common.pooling import Pooling
from common.wire_names import FinishReason
from engine.beams import BeamSearch
from engine.events import (
    NO_DRAFTS,
    DraftCounts,
    Embedded,
    EngineEvent,
    Failed,
    GeneratedRun,
    Started,
    TokenOutput,
    Tokens,
)
from engine.executor import Hidden, Logprobs
from engine.request import EngineRequest
from engine.sequence import Sequence, SequenceState
from engine.steps.scheduler import Scheduler

Sink = Callable[[EngineEvent], None]

MAX_EVENT_TOKENS = 256
"""Most tokens of one event of beams."""


@dataclass(slots=True, eq=False)
class Group:
    """The n samples of one request. The first sequence computes the prompt; the others are forked from it.

    Beams are replaced in every step; those that have died are forgotten.

    Work inside an engine is named by group, not by request id: after a failure two samples of one request may resume
    side by side. Engine thread only, except `sink`, which `EngineThread` calls on the event loop.
    """

    request: EngineRequest
    sink: Sink
    queued_s: float
    holds_after_prefill: bool = False
    """Whether its pages are kept for a puller after the prompt, instead of decoding."""
    sequences: list[Sequence] = field(default_factory=list)
    beams: BeamSearch | None = None
    """Set when its sequences are beams, best first."""
    prefill_started_s: float | None = None
    reported_prefill: bool = False
    reported_pins: bool = False
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    drafts: DraftCounts = NO_DRAFTS
    """Drafts of its sequences that were verified since the last event with tokens."""
    pooled: npt.NDArray[np.float64] | None = None
    """Sum of the hidden states of its embedding so far."""

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt."""
        return self.sequences[0]

    @property
    def is_over(self) -> bool:
        """Whether no sequence holds or awaits anything."""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    def admitted(self, sequence: Sequence, now_s: float) -> Started | None:
        """Note that a sequence's first chunk is planned. Returns the event unless it was returned before."""
        # A preempted prompt is computed from its beginning again.
        self.prompt_logprobs.clear()
        self.pooled = None
        if self.prefill_started_s is not None:
            return None
        self.prefill_started_s = now_s
        return Started(
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=now_s - self.queued_s,
            num_pulled_tokens=sequence.num_pulled_tokens,
        )

    def prefilled_elsewhere(self, now_s: float) -> None:
        """Note that another engine computed the prompt: nothing is reported about what is computed again here."""
        self.prefill_started_s, self.reported_prefill = now_s, True

    def tokens_event(self, outputs: Seq[TokenOutput], now_s: float) -> Tokens:
        """Return the event for a step's tokens; the first one of a prompt computed here has the prefill time."""
        prefill_s = None
        if not self.reported_prefill and self.prefill_started_s is not None:
            self.reported_prefill = True
            prefill_s = now_s - self.prefill_started_s
        prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        drafts, self.drafts = self.drafts, NO_DRAFTS
        return Tokens(
            tokens=tuple(outputs),
            prompt_logprobs=prompt_logprobs,
            prefill_s=prefill_s,
            drafts=drafts,
            num_pinned_tokens=self._take_pinned(),
        )

    def _take_pinned(self) -> int:
        """Return the leading tokens that its marks have pinned, once."""
        num_blocks = None if self.reported_pins else self.leader.num_pinned_blocks
        if num_blocks is None:
            return 0
        self.reported_pins = True
        return num_blocks * self.leader.block_size

    def add_pooled(self, part: Hidden | None) -> None:
        """Add a step's part of its embedding. Parts are added in float64: the result depends little on the steps."""
        if part is not None:
            self.pooled = part.astype(np.float64) if self.pooled is None else self.pooled + part

    def embedded_event(self, now_s: float) -> Embedded | Failed:
        """Return the event for its embedding when the whole prompt is computed; a failure when it is not finite."""
        assert self.pooled is not None, "the last step of a prompt has its last hidden state"
        assert self.prefill_started_s is not None, "a computed prompt was started"
        is_mean = self.request.pooling is Pooling.MEAN
        vector = self.pooled / (len(self.request.prompt_token_ids) if is_mean else 1)
        if not np.isfinite(vector).all():
            return Failed(error=EngineFault("the model's hidden states are not finite"))
        return Embedded(vector=vector.astype(np.float32), prefill_s=now_s - self.prefill_started_s)

    def answer_events(self, search: BeamSearch, now_s: float) -> Iterator[Tokens]:
        """Yield the events of the answers that a search has found, best first: one sample after the other."""
        for rank, answer in enumerate(search.complete):
            sample_index = self.request.first_sample_index + rank
            for begin in range(0, len(answer.token_ids), MAX_EVENT_TOKENS):
                token_ids = answer.token_ids[begin : begin + MAX_EVENT_TOKENS]
                reason = None
                if begin + len(token_ids) == len(answer.token_ids):
                    reason = FinishReason.STOP if answer.has_end else FinishReason.LENGTH
                run = GeneratedRun(
                    sample_index=sample_index, first_token_index=begin, token_ids=token_ids, finish_reason=reason
                )
                yield self._answer_event(run, now_s)

    def _answer_event(self, run: GeneratedRun, now_s: float) -> Tokens:
        if not self.request.sampling.detokenize:
            return replace(self.tokens_event((), now_s), runs=(run,))
        last = len(run.token_ids) - 1
        outputs = [
            TokenOutput(
                sample_index=run.sample_index,
                token_index=run.first_token_index + i,
                token_id=token_id,
                logprobs=None,
                finish_reason=run.finish_reason if i == last else None,
            )
            for i, token_id in enumerate(run.token_ids)
        ]
        return self.tokens_event(outputs, now_s)


Emitted = list[tuple[Group, EngineEvent]]


class Groups(dict[Sequence, Group]):
    """The group of each sequence that has not ended. Engine thread only."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        """Return another sample of a running sequence; see `Scheduler.fork`."""
        child = self._scheduler.fork(parent, sample_index)
        self[child] = self[parent]
        return child

    def samples(self, leader: Sequence, num_samples: int) -> list[Sequence]:
        """Return the samples of a computed prompt: its leader and those that are forked from it."""
        children = [self.fork(leader, leader.sample_index + 1 + i) for i in range(num_samples - 1)]
        self[leader].sequences.extend(children)
        return [leader, *children]

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, in any state; see `Scheduler.finish`."""
        self._scheduler.finish(sequence)
        self.pop(sequence, None)

    def cancel(self, group: Group) -> None:
        """End all sequences of a group."""
        for sequence in group.sequences:
            self.finish(sequence)
