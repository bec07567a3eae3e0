"""Orders to the ranks of a vLLM process group: one per step, with what has changed since the one before.

A rank keeps the tokens and pages of every sequence that is *open* there, as vLLM's own scheduler expects of it. So an
order names a sequence by a key and carries only its new tokens and pages. A sequence is opened, with all of them, by
its first step; by the first one behind a preemption; and when a page of its block table is replaced, which vLLM has no
word for. Neither vLLM nor torch is imported here.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens
from engine.executor import ScheduledSequence
from engine.grammar import Allowed
from engine.sequence import Sequence, SequenceState

_TRIAL = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A sequence that the ranks do not know yet."""

    sampling: SamplingParams
    prompt_token_ids: TokenArray
    output_token_ids: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Tokens to choose after the last new token of a sequence."""

    num_samples: int
    sample_index: int
    """Index of the first sample."""
    token_index: int
    """Index of the token among the generated ones."""
    allowed: Allowed | None
    """Tokens that the grammar allows; None without a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens)."""

    key: str
    """Name of the open sequence; never used again for another one."""
    opened: Opened | None
    new_output: TokenArray
    """Generated tokens behind those that the ranks know."""
    new_blocks: "array[int]"
    """Pages behind those that the ranks know; for an opened sequence its whole block table."""
    num_computed: int
    num_new_tokens: int
    sample: SampleOrder | None
    """None when the chunk ends before the last token."""
    targets: TokenArray
    """Prompt tokens whose log-probabilities are due, from the second of the chunk on."""
    num_top: int
    """Best tokens reported with each of them."""
    first_pooled: int | None
    """See `ScheduledSequence.first_pooled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """One step of all ranks."""

    closed: tuple[str, ...]
    """Sequences that no later step names."""
    sequences: tuple[SequenceOrder, ...]


@dataclass(slots=True)
class _Known:
    """The ranks' record of an open sequence."""

    key: str
    num_tokens: int
    block_table: "array[int]"


class OrderBook:
    """Makes orders, and knows what the ranks know. Engine thread only."""

    def __init__(self) -> None:
        self._known: dict[Sequence, _Known] = {}
        self._closed: list[str] = []
        self._num_opened = 0

    def order(self, batch: Seq[ScheduledSequence]) -> StepOrder:
        """Return the order of a step. The ranks must get every order, in turn, or `forget` is called."""
        running = {item.sequence for item in batch}
        for sequence in [each for each in self._known if each not in running]:
            if sequence.state is not SequenceState.RUNNING:
                self._close(sequence)
        sequences = tuple(self._sequence_order(item) for item in batch)
        closed, self._closed = tuple(self._closed), []
        return StepOrder(closed=closed, sequences=sequences)

    def trial(self) -> StepOrder:
        """Return the order of a step of one token on the first page. The next order closes its sequence."""
        self._closed.append(_TRIAL)
        sequence = SequenceOrder(
            key=_TRIAL,
            opened=Opened(sampling=SamplingParams(), prompt_token_ids=as_tokens([0]), output_token_ids=as_tokens(())),
            new_output=as_tokens(()),
            new_blocks=array("i", [0]),
            num_computed=0,
            num_new_tokens=1,
            sample=SampleOrder(num_samples=1, sample_index=0, token_index=0, allowed=None),
            targets=as_tokens(()),
            num_top=0,
            first_pooled=None,
        )
        return StepOrder(closed=(), sequences=(sequence,))

    def forget(self) -> None:
        """Close every sequence: a step has failed, and how much of it the ranks have done is not known."""
        for sequence in list(self._known):
            self._close(sequence)

    def _sequence_order(self, item: ScheduledSequence) -> SequenceOrder:
        sequence = item.sequence
        num_tokens = item.sequence.num_computed + item.num_new_tokens
        num_blocks = -(-num_tokens // sequence.block_size)
        block_table = sequence.block_table[:num_blocks]
        known = self._known.get(sequence)
        if known is not None and known.block_table != block_table[: len(known.block_table)]:
            self._close(sequence)
            known = None
        opened = None
        if known is None:
            self._num_opened += 1
            known = _Known(str(self._num_opened), len(sequence.token_ids), array("i"))
            self._known[sequence] = known
            opened = Opened(
                sampling=sequence.request.sampling,
                prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                output_token_ids=sequence.output_token_ids,
            )
        new_output = sequence.token_ids[known.num_tokens :]
        new_blocks = block_table[len(known.block_table) :]
        known.num_tokens = len(sequence.token_ids)
        known.block_table = block_table
        num_top = sequence.request.sampling.num_prompt_logprobs
        last_target = sequence.num_prompt_tokens if num_top is not None else 0
        return SequenceOrder(
            key=known.key,
            opened=opened,
            new_output=new_output,
            new_blocks=new_blocks,
            num_computed=sequence.num_computed,
            num_new_tokens=item.num_new_tokens,
            sample=_sample_order(item) if item.num_samples else None,
            targets=sequence.token_ids[sequence.num_computed + 1 : last_target][: item.num_new_tokens],
            num_top=num_top or 0,
            first_pooled=item.first_pooled,
        )

    def _close(self, sequence: Sequence) -> None:
        self._closed.append(self._known.pop(sequence).key)


def _sample_order(item: ScheduledSequence) -> SampleOrder:
    allowed = item.sequence.allowed(item.draft)
    return SampleOrder(
        num_samples=item.num_samples,
        sample_index=item.sequence.sample_index,
        token_index=item.token_index,
        allowed=None if allowed is None else allowed[0],
    )
