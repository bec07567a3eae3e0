"""A request inside one engine: its samples and the sink of its events."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.events import EngineEvent, Started, TokenOutput, Tokens
from engine.executor import Logprobs
from engine.sequence import EngineRequest, Sequence, SequenceState

Sink = Callable[[EngineEvent], None]


@dataclass(slots=True, eq=False)
class Group:
    """The n samples of one request. The first sequence computes the prompt; the others are forked from it.

    Work inside an engine is named by group, not by request id: after a failure two samples of one request may resume
    side by side. Engine thread only, except `sink`, which `EngineThread` calls on the event loop.
    """

    request: EngineRequest
    sink: Sink
    queued_s: float
    holds_after_prefill: bool = False
    """Whether its pages are kept for a puller after the prompt, instead of decoding."""
    sequences: list[Sequence] = field(default_factory=list)
    prefill_started_s: float | None = None
    reported_prefill: bool = False
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

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
        self.prompt_logprobs.clear()  # a preempted prompt is computed from its beginning again
        if self.prefill_started_s is not None:
            return None
        self.prefill_started_s = now_s
        return Started(
            num_cached_tokens=sequence.num_cached_tokens,
            queue_s=now_s - self.queued_s,
            num_pulled_tokens=sequence.num_pulled_tokens,
        )

    def tokens_event(self, outputs: Seq[TokenOutput], now_s: float) -> Tokens:
        """Return the event for a step's tokens; the first one of a prompt computed here has the prefill time."""
        prefill_s = None
        if not self.reported_prefill and self.prefill_started_s is not None:
            self.reported_prefill = True
            prefill_s = now_s - self.prefill_started_s
        prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return Tokens(tokens=tuple(outputs), prompt_logprobs=prompt_logprobs, prefill_s=prefill_s)
