"""A request inside one engine: its samples, and where its events go."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.events import EngineEvent
from engine.executor import Logprobs
from engine.sequence import EngineRequest, Sequence, SequenceState

Sink = Callable[[EngineEvent], None]


@dataclass(slots=True, eq=False)
class Group:
    """The n samples of one request. The first sequence computes the prompt; the others are forked from it.

    A group, not a request id, names work inside an engine: after a failure two samples of one request may be resumed
    side by side. Engine thread only, except `sink`, which `EngineThread` calls on the event loop.
    """

    request: EngineRequest
    sink: Sink
    queued_s: float
    holds_after_prefill: bool = False
    """Keep the pages after the prompt instead of decoding: a puller will come."""
    sequences: list[Sequence] = field(default_factory=list)
    prefill_started_s: float | None = None
    reported_prefill: bool = False
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @classmethod
    def of(cls, request: EngineRequest, sink: Sink, now_s: float) -> "Group":
        """Return a group that has no sequence yet."""
        return cls(request=request, sink=sink, queued_s=now_s)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt."""
        return self.sequences[0]

    @property
    def is_over(self) -> bool:
        """Whether no sequence holds or awaits anything."""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)
