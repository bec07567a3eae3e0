"""The seam between bookkeeping and arithmetic.

Above it (scheduler, block pool, loop) there are no tensors; below it (model runner, sampler, KV store) no queues.
`engine.runner.ModelExecutor` computes with torch; `engine.fake.FakeExecutor` computes a hash of the pages.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from common.pooling import Pooling
from common.tokens import TokenArray, as_tokens
from engine.kv_store import KvStore
from engine.sequence import Sequence, SequenceState
from engine.text.grammar import Allowed
from engine.work import StepFloors

Hidden: TypeAlias = npt.NDArray[np.float32]
"""Hidden state of a token after the model's last norm, or a sum of some, float32 [hidden_size]."""

States: TypeAlias = npt.NDArray[np.float32]
"""States of a model at some consecutive tokens, from which drafts are made, float32 [num_tokens, size]."""


class DeviceBroken(Exception):
    """No step succeeds any more; the process has to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities at one position, from the distribution before any sampling parameter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A chosen token."""

    token_id: int
    """Negative where the logits have no finite maximum."""
    logprobs: Logprobs | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """Drafted tokens that may follow the first `depth` ones of a draft, in place of those that do.

    Its rows read a block table of its own, so that the step computes them as if there were no other draft. The tokens
    before it are computed once, and written to its pages, too.
    """

    depth: int
    token_ids: TokenArray
    num_shared_blocks: int = 0
    """Leading blocks of the table that are its sequence's."""
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """Page of each block; those behind the shared ones are its own."""


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: tokens [num_computed, num_computed + num_new_tokens), as of `launch`.

    With a draft these are the last known token and the drafted ones, and the tokens of branches come on top. The step
    samples behind each of them, and a drafted token is accepted while it equals the one sampled at its place; the
    tokens behind a rejected one are void.
    """

    sequence: Sequence
    num_new_tokens: int
    num_samples: int
    """0 if the chunk ends before the last token; n for a prompt with n samples; else 1."""
    input_row: int | None = None
    """Row of the input token among the tokens that the previously launched step samples, when the host does not know it
    yet; the chunk is then that one token. Rows are all samples of that batch in order, item 0's num_sampled first."""
    draft: TokenArray = field(default_factory=lambda: as_tokens(()))
    """Tokens that may follow the known ones: the last of the new tokens. Empty unless the executor verifies drafts."""
    branches: tuple[Branch, ...] = ()
    """Other tokens that may follow the leading ones of the draft. No two begin with the same token at one place."""
    rejects: bool = False
    """Whether its draft is verified by the rejection rule: accepted with the probability that the model gives it."""
    token_index: int = field(init=False)
    """Index of the first token that the step samples among the generated ones."""

    def __post_init__(self) -> None:
        """Take the index before the sequence goes on."""
        self.token_index = self.sequence.num_output_tokens + (self.input_row is not None)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples: those of all samples, and one behind each drafted token."""
        return self.num_samples + self.num_drafted

    @property
    def num_drafted(self) -> int:
        """Drafted tokens, those of branches included."""
        return len(self.draft) + sum(len(branch.token_ids) for branch in self.branches)

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes: the new ones, then those of its branches."""
        return self.num_new_tokens - len(self.draft) + self.num_drafted

    @property
    def token_ids(self) -> TokenArray:
        """The tokens that the step computes, whose values are all known. Valid inside `launch`."""
        begin = self.sequence.num_computed
        known = self.sequence.token_ids[begin : begin + self.num_new_tokens - len(self.draft)]
        return sum((branch.token_ids for branch in self.branches), known + self.draft)

    @property
    def paths(self) -> "list[TokenArray]":
        """The whole draft of each branch, from the first drafted token on."""
        return [self.draft[: branch.depth] + branch.token_ids for branch in self.branches]

    def walk(self, sampled: "Seq[Sampled]") -> "Walk":
        """Return which of the sampled tokens count: up to the first one that was not drafted for its place."""
        places = [*range(self.num_samples)]
        for place, token_id in enumerate(self.draft):
            if sampled[place].token_id != token_id:
                return self._turn_off(place, sampled)
            places.append(place + 1)
        return Walk(places)

    def _turn_off(self, depth: int, sampled: "Seq[Sampled]") -> "Walk":
        """Return the walk that leaves the draft after its first `depth` tokens."""
        begin = 1 + len(self.draft)
        places = [*range(depth + 1)]
        for branch in self.branches:
            if branch.depth == depth and branch.token_ids[0] == sampled[depth].token_id:
                places.append(begin)
                for place, token_id in enumerate(branch.token_ids[1:], begin):
                    if sampled[place].token_id != token_id:
                        break
                    places.append(place + 1)
                return Walk(places, branch)
            begin += len(branch.token_ids)
        return Walk(places)

    @property
    def chooses_late(self) -> bool:
        """Whether its token is chosen in `StepHandle.choose`: what its grammar allows depends on the pending token."""
        return self.input_row is not None and self.sequence.request.grammar is not None

    @property
    def is_input_known(self) -> bool:
        """Whether the host knows all tokens before the first that the step samples."""
        return self.token_index <= self.sequence.num_output_tokens

    @property
    def is_overtaken(self) -> bool:
        """Whether what the step samples is void: its grammar has forced that token, and maybe others behind it.

        Valid until the step's own tokens are appended.
        """
        return self.token_index < self.sequence.num_output_tokens

    def allowed(self, path: TokenArray) -> list[Allowed] | None:
        """Return what `Sequence.allowed` does; None also while that is not known, and when it has ended."""
        sequence = self.sequence
        is_due = self.is_input_known and sequence.state is not SequenceState.FINISHED
        return sequence.allowed(path) if is_due else None

    @property
    def first_pooled(self) -> int | None:
        """First of its new tokens whose hidden states, to the end, belong to an embedding; None: none do.

        Valid inside `launch`.
        """
        sequence = self.sequence
        match sequence.request.pooling:
            case Pooling.MEAN:
                return 0
            case Pooling.LAST if sequence.num_computed + self.num_new_tokens == sequence.num_tokens:
                return self.num_new_tokens - 1
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Walk:
    """The sampled tokens of a draft that count."""

    places: list[int]
    """Their places among all that were sampled, in order."""
    branch: Branch | None = None
    """Branch that the last of them follow."""


@dataclass(slots=True)
class StepResult:
    """Output for one ScheduledSequence."""

    sampled: list[Sampled]
    """Tokens of num_samples samples; entry j belongs to sample_index + j. With a draft, the accepted tokens and the one
    behind them (`ScheduledSequence.walk`)."""
    prompt_logprobs: list[Logprobs]
    """Log-probabilities of token p + 1, for each scheduled position p with p + 1 inside the prompt, when requested."""
    states: States | None = None
    """States of the latest tokens that the step has computed, without those of rejected ones; the last of the sampled
    tokens was chosen behind the last one. Only where drafts are made of them (`ModelExecutor.kept_states`)."""
    pooled: Hidden | None = None
    """Sum of the hidden states of the new tokens from `first_pooled` on, added up in float32; None without any."""
    branch: Branch | None = None
    """Branch whose pages hold the accepted tokens; None: those of the sequence do."""

    @property
    def has_failed(self) -> bool:
        """Whether logits of it have no finite maximum: the KV behind them is worth nothing either."""
        return any(sampled.token_id < 0 for sampled in self.sampled)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted. Only for a sequence with a draft."""
        return len(self.sampled) - 1

    @property
    def num_right(self) -> int:
        """Tokens of the first draft that were accepted; the others are a branch's. Only for a sequence with a draft."""
        return self.num_accepted if self.branch is None else self.branch.depth


class StepHandle(Protocol):
    """A launched step. Engine thread only."""

    def choose(self) -> None:
        """Choose the tokens that waited for those of the step before (`ScheduledSequence.chooses_late`).

        Called once these are appended, before the next launch; not at all when nothing waits, or the step before has
        failed. When it raises, the step no longer runs. Raises DeviceBroken.
        """
        ...

    def results(self) -> list[StepResult]:
        """Wait for the step and return one result per scheduled sequence, in order. Called exactly once.

        Does not read the sequences, which have changed since. When it raises, the step no longer runs. Raises
        DeviceBroken.
        """
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """The handle of an executor that computes inside `launch`."""

    step_results: list[StepResult]

    def choose(self) -> None:
        """Do nothing: no token waited."""

    def results(self) -> list[StepResult]:
        """Return the results."""
        return self.step_results


class Executor(Protocol):
    """Computes steps, in the order in which they are launched. Engine thread only."""

    kv: KvStore
    max_model_len: int
    vocab_size: int
    hidden_size: int
    """Length of an embedding; 0 when it cannot compute any."""
    eos_token_ids: frozenset[int]
    model_name: str
    max_steps_in_flight: int
    """1: a step's tokens are known before the next launch. 2: step n + 1 is planned and launched while step n computes,
    with `ScheduledSequence.input_row`."""
    verifies_drafts: bool
    """Whether it takes drafts, and computes the same bits behind a drafted token as behind a known one."""
    compiles_steps: bool
    """Whether the first steps of a kind may compile kernels, which takes minutes."""
    exact_resume: bool
    """Whether tokens that are read again choose the next one as the tokens that were generated would have, also where
    two are almost equally good. False where sums depend on how a prompt is cut, or codes on the last bit of a sum."""
    floors: StepFloors | None
    """Least times of its steps on this device; None: not known."""

    def launch(self, batch: Seq[ScheduledSequence]) -> StepHandle:
        """Start one step: write KV of all new tokens, sample where asked. Does not mutate the sequences.

        Every sequence's block_table covers num_computed + num_new_tokens tokens. The sequences are read before this
        returns, and no view of a block_table outlives it (an exported array cannot grow). Results are taken in launch
        order. When it raises, neither the step nor a block copy requested before it is running. Raises DeviceBroken.
        """
        ...
