"""Which tokens of a request were delivered: each index of each sample at most once, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.errors import EngineFault
from kvrelay.v1 import sampling_pb2


@dataclass(slots=True)
class Sample:
    """One of the n answers."""

    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


class TokenLedger:
    """The answers so far, and when their tokens came. Event loop only."""

    def __init__(self, *, num_samples: int, clock: Clock) -> None:
        self._samples = [Sample() for _ in range(num_samples)]
        self._clock = clock
        self.has_prompt_logprobs = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps_s: list[float] = []
        """Between the tokens of the first sample, recovery pauses included."""
        self._previous_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Delivered tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self._samples)

    def output(self, sample_index: int) -> tuple[int, ...]:
        """Return the delivered tokens of a sample."""
        return tuple(self._samples[sample_index].token_ids)

    def unfinished(self, sample_indices: Iterable[int]) -> list[int]:
        """Return those of the samples that have not ended."""
        return [index for index in sample_indices if not self._samples[index].is_finished]

    def accept(self, tokens: Sequence[sampling_pb2.SampleToken], *, expected: range) -> list[sampling_pb2.SampleToken]:
        """Take tokens of the samples `expected` and return the new ones; duplicates fall away.

        Raises EngineFault, and takes nothing, when an index is missing or a token belongs to another sample.
        """
        num_known: dict[int, int] = {}
        new: list[sampling_pb2.SampleToken] = []
        for token in tokens:
            index = token.sample_index
            if index not in expected:
                raise EngineFault(f"a token of sample {index}; expected are {expected.start} to {expected.stop - 1}")
            sample = self._samples[index]
            position = num_known.setdefault(index, len(sample.token_ids))
            if token.token_index > position:
                raise EngineFault(f"sample {index} jumps from token {position - 1} to {token.token_index}")
            if token.token_index == position and not sample.is_finished:
                num_known[index] += 1
                new.append(token)
        for token in new:
            self._take(token)
        return new

    def _take(self, token: sampling_pb2.SampleToken) -> None:
        sample = self._samples[token.sample_index]
        sample.token_ids.append(token.token_id)
        sample.is_finished = token.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED
        now_s = self._clock.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if token.sample_index == 0:
            if self._previous_s is not None:
                self.gaps_s.append(now_s - self._previous_s)
            self._previous_s = now_s
