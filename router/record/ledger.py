"""The delivered tokens of a request: each index of each sample at most once, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.errors import EngineFault
from common.tokens import TokenArray, as_tokens, num_packed
from common.wire_names import FINISH_REASON_NAMES
from kvrelay.v1 import sampling_pb2


@dataclass(slots=True)
class SampleTokens:
    """One of the n answers."""

    token_ids: TokenArray = field(default_factory=lambda: as_tokens(()))
    is_finished: bool = False
    finish_reason: int = 0
    """The sampling_pb2.FinishReason that came with its last token; 0 before, and where it ended without one."""


class TokenLedger:
    """The answers so far and the times of their tokens. Event loop only."""

    def __init__(self, *, num_samples: int, clock: Clock) -> None:
        self._samples = [SampleTokens() for _ in range(num_samples)]
        self._clock = clock
        self.has_prompt_logprobs = False
        self.num_finished = 0
        """Samples that have ended."""
        self.num_taken = 0
        """Tokens of all samples that this router has delivered, without those that were resumed."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps: list[tuple[float, int]] = []
        """Gaps between consecutive tokens of the first sample, as (seconds, number of such gaps in a row).

        Includes recovery pauses. The tokens of a run count as evenly spaced.
        """
        self._previous_s: float | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether any token was delivered."""
        return self.first_token_s is not None

    @property
    def num_tokens(self) -> int:
        """Delivered tokens of all samples."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Delivered tokens of each sample."""
        return [len(sample.token_ids) for sample in self._samples]

    @property
    def finish_reasons(self) -> list[str]:
        """Names of the reasons for which samples have ended, in the order of the samples."""
        return [FINISH_REASON_NAMES[each.finish_reason] for each in self._samples if each.finish_reason]

    def mean_gap_s(self, *, skip: int = 0) -> float | None:
        """Return the mean gap without the first `skip` entries of `gaps`; None when none is left."""
        gaps = self.gaps[skip:]
        return sum(gap_s * count for gap_s, count in gaps) / sum(count for _, count in gaps) if gaps else None

    def resume(self, sample_index: int, token_ids: TokenArray) -> None:
        """Take tokens that another router has delivered; they count but have no time."""
        assert not self._samples[sample_index].token_ids, "a sample is resumed before its first token"
        self._samples[sample_index].token_ids = token_ids[:]
        self.has_prompt_logprobs |= bool(token_ids)  # they come with the first token

    def finish(self, sample_index: int) -> None:
        """Mark a sample as ended."""
        self._finish(self._samples[sample_index])

    def end_without_tokens(self) -> None:
        """Mark the only sample as ended now: its answer, which is not a token, counts as the first and the last one."""
        self.finish(0)
        self.first_token_s = self.last_token_s = self._clock.monotonic()

    def output(self, sample_index: int) -> TokenArray:
        """Return a copy of the delivered tokens of a sample."""
        return self._samples[sample_index].token_ids[:]

    def unfinished(self, sample_indices: Iterable[int]) -> list[int]:
        """Return the samples that have not ended."""
        return [index for index in sample_indices if not self._samples[index].is_finished]

    def accept(
        self, tokens: Sequence[sampling_pb2.SampleToken], *, expected: range
    ) -> Sequence[sampling_pb2.SampleToken]:
        """Take tokens of the samples `expected` and return the new ones, without duplicates.

        Raises EngineFault, and takes nothing, when an index is missing or a token belongs to another sample.
        """
        if len(tokens) == 1 and tokens[0].sample_index in expected:  # nearly every message
            token, sample = tokens[0], self._samples[tokens[0].sample_index]
            if token.token_index == len(sample.token_ids) and not sample.is_finished:
                self._take(token, sample)
                return tokens
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
            self._take(token, self._samples[token.sample_index])
        return new

    def _take(self, token: sampling_pb2.SampleToken, sample: SampleTokens) -> None:
        sample.token_ids.append(token.token_id)
        if token.finish_reason:
            sample.finish_reason = token.finish_reason
            self._finish(sample)
        self._stamp(token.sample_index, 1)

    def accept_runs(self, runs: Sequence[sampling_pb2.TokenRun], *, expected: range) -> list[sampling_pb2.TokenRun]:
        """Take runs of the samples `expected` and return their new parts.

        Apart from copying bytes, the cost does not depend on the length. Raises EngineFault, and takes nothing, when
        tokens are missing before a run or it belongs to another sample.
        """
        lengths: dict[int, int] = {}
        new: list[sampling_pb2.TokenRun] = []
        for run in runs:
            index, first, raw = run.sample_index, run.first_token_index, run.tokens
            if index not in expected or len(raw) % 4:
                raise EngineFault(
                    f"a run of {len(raw)} bytes for sample {index}; expected are samples {list(expected)}"
                )
            length = lengths.setdefault(index, len(self._samples[index].token_ids))
            if first > length:
                raise EngineFault(f"sample {index} jumps from token {length - 1} to {first}")
            end = first + num_packed(raw)
            if self._samples[index].is_finished or end <= length:
                continue
            if first < length:
                run = sampling_pb2.TokenRun(
                    sample_index=index,
                    first_token_index=length,
                    tokens=raw[4 * (length - first) :],
                    finish_reason=run.finish_reason,
                )
            lengths[index] = end
            new.append(run)
        for run in new:
            sample = self._samples[run.sample_index]
            sample.token_ids.frombytes(run.tokens)  # little-endian, 32 bits, like all supported processors
            if run.finish_reason:
                sample.finish_reason = run.finish_reason
                self._finish(sample)
            self._stamp(run.sample_index, num_packed(run.tokens))
        return new

    def _finish(self, sample: SampleTokens) -> None:
        sample.is_finished = True
        self.num_finished += 1

    def _stamp(self, sample_index: int, num_tokens: int) -> None:
        now_s = self._clock.monotonic()
        self.num_taken += num_tokens
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if sample_index == 0:
            if self._previous_s is not None:
                self.gaps.append(((now_s - self._previous_s) / num_tokens, num_tokens))
            elif num_tokens > 1:
                self.gaps.append((0.0, num_tokens - 1))
            self._previous_s = now_s
