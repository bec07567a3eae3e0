"""What came of an answer, cut by choices: consecutive tokens of one sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.tokens import TokenArray
from kvrelay.v1 import inference_pb2, sampling_pb2

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_UNSPECIFIED: None,
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a choice continues, where the caller wants to see it again."""

    text: str | None
    """To be echoed; None: no."""
    token_ids: TokenArray
    logprobs: Sequence[sampling_pb2.PositionLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one choice."""

    index: int
    """Of the choice."""
    tokens: Sequence[sampling_pb2.SampleToken]
    prompt: Prompt | None
    """With the first piece of its choice."""

    @property
    def text(self) -> str:
        """Text that became certain with these tokens."""
        return "".join([token.text for token in self.tokens])

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, or None."""
        return FINISH_REASONS[self.tokens[-1].finish_reason]


def by_sample(delta: inference_pb2.TokenDelta) -> dict[int, list[sampling_pb2.SampleToken]]:
    """Return the tokens of each sample, in order."""
    samples: dict[int, list[sampling_pb2.SampleToken]] = {}
    for token in delta.tokens:
        samples.setdefault(token.sample_index, []).append(token)
    return samples
