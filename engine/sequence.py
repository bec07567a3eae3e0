"""One sample of a request inside an engine: its tokens, its pages, and how far both are."""

import enum
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import overload

from common.block_hash import extend_hash, num_usable_blocks
from common.ids import BlockHash, BlockId
from common.pooling import Pooling
from common.tokens import TokenArray
from engine.beams import Candidates
from engine.request import EngineRequest
from engine.text.grammar import Allowed, GrammarState
from engine.window_ids import NO_WINDOWS, WindowIds

MAX_FORCED_TOKENS = 64
"""Most tokens, of all sequences together, that are appended behind one step because grammars leave no choice. Looking
for them takes up to 0.1 ms a token, and the next step computes them beside the answers of others."""


class SequenceState(enum.Enum):
    """State of a sequence inside one engine.

        WAITING ──▶ RUNNING ──▶ HELD ──▶ FINISHED
          ▲ ▲          ▲ │
          │ └──────────┼─┘   preempted
          └─ RESERVED ─┘     a transfer has filled it; beams line up again

    Every live state may also end in FINISHED.
    """

    WAITING = "waiting"  # no pages; in line for admission, at the front after a preemption
    RESERVED = "reserved"  # holds pages that a transfer is filling
    RUNNING = "running"  # in the batch: prefilling or decoding
    HELD = "held"  # prefill is over; its pages are pinned for a puller
    FINISHED = "finished"  # holds nothing


_NEXT: dict[SequenceState, frozenset[SequenceState]] = {
    # WAITING: a new sequence lines up. RESERVED: its pages are granted at once, for a transfer to fill.
    SequenceState.WAITING: frozenset(
        {SequenceState.WAITING, SequenceState.RESERVED, SequenceState.RUNNING, SequenceState.FINISHED}
    ),
    SequenceState.RESERVED: frozenset({SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.HELD, SequenceState.FINISHED}),
    SequenceState.HELD: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. Engine thread only.

    Tokens and KV:

        [0, num_ready)             KV exists
        [num_ready, num_computed)  steps in flight write it
        [num_computed, num_tokens) still to run; when decoding that is one token

    A step in flight may sample a token that is not known yet: it is *pending*, and num_tokens does not count it. The
    next step may still run on it; num_computed is then ahead of num_tokens until it is known. Blocks
    [0, num_published) are in the prefix cache (shared, read-only). block_hashes has a hash for each full block of known
    tokens.
    """

    request: EngineRequest
    order: int
    """Place in line: arrival number of the request, kept through preemption."""
    sample_index: int
    block_size: int
    token_ids: TokenArray
    """Prompt and output. It grows in place: no NumPy view of it may outlive the call that made it."""
    num_prompt_tokens: int
    block_hashes: list[BlockHash]
    max_num_tokens: int
    """Length at which it ends, prompt included."""
    is_pinned: bool = False
    """Whether a puller reads its pages as they fill: it is then never preempted."""
    state: SequenceState = SequenceState.WAITING
    num_ready: int = 0
    num_computed: int = 0
    decodes_since: tuple[float, float] | None = None
    """Time at which prompts beside it were first considered, and their delays of all steps before (step_budget.py)."""
    num_in_flight: int = 0
    """Launched, incomplete steps that compute a part of it; they may write its pages."""
    num_pending: int = 0
    """Steps in flight that sample a token of it."""
    pending_row: int | None = None
    """Place of the latest pending token among its step's tokens; None when the next step must wait for its value."""
    pulled_blocks: range = range(0)
    """Indexes of the blocks that were pulled into the cache for this request."""
    landed_blocks: "array[int]" = field(default_factory=lambda: array("i"))
    """Pages of leading blocks that a pull brought or found, held while it waits for admission."""
    landed_windows: range = range(0)
    """Those whose window pages it needs meanwhile."""
    num_cached_tokens: int = 0
    num_known_blocks: int = 0
    """Leading blocks that the cache held when it was admitted, those behind which it could not begin included."""
    num_expected_cached_tokens: int = 0
    """Leading tokens that the cache held at the last check, while it waits for admission."""
    num_published: int = 0
    num_pinned_blocks: int | None = None
    """Leading blocks that its marks have pinned; None: it has no marks, or they are not published yet."""
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    """Page of each block, int32, grown in place: kernels read it without a copy. An entry changes when the last block
    is copied before a write, or when an equal page that was published first takes its place; the old page stays
    unchanged until the sequence ends."""
    window_blocks: range = range(0)
    """Blocks of its table whose window pages it needs."""
    awaited_windows: WindowIds = NO_WINDOWS
    """Window pages of a reservation, those that a transfer fills included."""
    window_quota: int = 0
    """Window pages that are promised to it, and to the samples that will be forked from it."""
    retired_blocks: list[BlockId] = field(default_factory=list)
    """Own pages that an equal published page replaced in the block table; still held."""
    grammar_state: GrammarState | None = None
    """State of its grammar after the tokens that were looked at; None before the first look."""
    beams: "list[Sequence] | None" = None
    """The beams that compete with it, best first, itself included; one list for all of them. None: it is not a beam."""
    candidates: Candidates | None = None
    """Its best next tokens, once its known tokens are computed; it then waits for the other beams."""

    @classmethod
    def from_request(cls, request: EngineRequest, *, block_size: int, order: int) -> "Sequence":
        """Return the leading sequence of a request; the other n - 1 samples are forked from it after prefill."""
        return cls(
            request=request,
            order=order,
            sample_index=request.first_sample_index,
            block_size=block_size,
            token_ids=request.prompt_token_ids + request.output_token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            block_hashes=request.block_hashes.digests(),
            max_num_tokens=len(request.prompt_token_ids) + request.sampling.max_tokens,
        )

    def enter(self, state: SequenceState) -> None:
        """Change the state. Only the scheduler does, which keeps the lists that go with it."""
        assert state in _NEXT[self.state], f"sequence {self.order}: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_to_run(self) -> int:
        """Tokens that the next step may compute: all that are known, or the pending one when it may run unknown."""
        num_left = len(self.token_ids) - self.num_computed
        if not self.num_pending:
            return num_left
        num_tokens = len(self.token_ids) + self.num_pending
        may_run = self.pending_row is not None and num_tokens < self.max_num_tokens
        return num_left + self.num_pending if may_run else 0

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the host needs the value of the sampled token before the next step; grammars need it later."""
        return self.is_pinned or self.request.sampling.has_beams

    @property
    def will_decode(self) -> bool:
        """Whether this engine generates its answer."""
        return not self.is_pinned and self.request.pooling is None

    @property
    def num_pulled_tokens(self) -> int:
        """Cached tokens that were pulled for this request."""
        first, stop = self.pulled_blocks.start, self.pulled_blocks.stop
        return max(0, min(self.num_cached_tokens, stop * self.block_size) - first * self.block_size)

    def num_found(self, num_cached_blocks: int) -> int:
        """Return how many leading cached blocks it reuses: those before any that were pulled for it."""
        is_more = num_cached_blocks > self.pulled_blocks.stop
        return num_cached_blocks if is_more else min(num_cached_blocks, self.pulled_blocks.start)

    @property
    def num_samples(self) -> int:
        """Samples drawn for the next token, and places in the batch: n at the end of a fresh prompt, else 1."""
        return self.request.sampling.n if self.num_output_tokens == 0 else 1

    @property
    def is_beam(self) -> bool:
        """Whether it competes with other sequences."""
        return self.beams is not None

    @property
    def num_rows(self) -> int:
        """Tokens that the step at its end samples: none, one per sample, or one that reports a beam's candidates."""
        if self.request.pooling is not None:
            return 0
        return 1 if self.request.sampling.has_beams else self.num_samples

    @property
    def num_reusable_blocks(self) -> int:
        """Leading blocks that a cache may save."""
        if self.request.sampling.num_prompt_logprobs is not None and self.num_output_tokens == 0:
            return 0  # logits of every prompt position are needed
        if self.request.pooling is Pooling.MEAN:
            return 0  # hidden states, likewise
        return num_usable_blocks(len(self.token_ids), self.block_size)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by any worker."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> TokenArray:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether the rest to run is an answer's: one token, and those that its grammar forced after it."""
        num_to_run = self.num_to_run
        return num_to_run == 1 or (num_to_run <= 1 + MAX_FORCED_TOKENS and self.num_computed >= self.num_prompt_tokens)

    def allowed(self, draft: TokenArray) -> list[Allowed] | None:
        """Return the tokens that its grammar allows next, and behind each token of a draft that `following` has cut.

        None without a grammar. Do not change them.
        """
        state = self._grammar_state()
        return None if state is None else state.allowed_along(OutputTokens(self), draft)

    def following(self, draft: TokenArray) -> TokenArray:
        """Return the leading tokens of a draft that may follow: all without a grammar."""
        state = self._grammar_state()
        return draft if state is None or not draft else draft[: state.num_following(OutputTokens(self), draft)]

    @property
    def is_cut(self) -> bool:
        """Whether its answer may not end where it is, but for a grammar that exceeds its limits."""
        state = self._grammar_state()
        if state is None:
            return False
        state.allowed(OutputTokens(self))
        return not state.is_complete

    def forced_token(self) -> int | None:
        """Return the token that comes next whatever the model says; None when there is a choice."""
        state = self._grammar_state()
        return None if state is None else state.forced(OutputTokens(self))

    def _grammar_state(self) -> GrammarState | None:
        if self.grammar_state is None and self.request.grammar is not None:
            self.grammar_state = self.request.grammar.begin()
        return self.grammar_state

    def block_ids(self) -> tuple[BlockId, ...]:
        """Return the block table as it is now, for another thread."""
        return tuple(map(BlockId, self.block_table))

    def append_token(self, token_id: int) -> None:
        """Add a generated token; extends block_hashes when it fills a block. O(1)."""
        self.token_ids.append(token_id)
        self.hash_new_blocks()

    def force_token(self, token_id: int) -> None:
        """Add a token that its grammar forces. A step in flight may sample one for that place, which is then void."""
        self.num_pending = 0
        self.append_token(token_id)

    def append_tokens(self, token_ids: TokenArray) -> None:
        """Add generated tokens."""
        self.token_ids += token_ids
        self.hash_new_blocks()

    def hash_new_blocks(self) -> None:
        """Extend block_hashes by the blocks that new tokens have filled."""
        while (len(self.block_hashes) + 1) * self.block_size <= len(self.token_ids):
            start = len(self.block_hashes) * self.block_size
            parent = self.block_hashes[-1] if self.block_hashes else self.request.hash_root
            self.block_hashes.append(extend_hash(parent, self.token_ids[start : start + self.block_size]))

    def beside(self, sample_index: int, output: TokenArray) -> "Sequence":
        """Return a beam of the same search without pages, with other tokens after the prompt."""
        beam = Sequence.from_request(self.request, block_size=self.block_size, order=self.order)
        beam.sample_index, beam.max_num_tokens, beam.beams = sample_index, self.max_num_tokens, self.beams
        beam.num_pinned_blocks = self.num_pinned_blocks
        beam.append_tokens(output)
        return beam

    def fork(self, sample_index: int) -> "Sequence":
        """Return a copy for another sample with the same pages; the caller adds the references."""
        return Sequence(
            request=self.request,
            order=self.order,
            sample_index=sample_index,
            block_size=self.block_size,
            token_ids=self.token_ids[:],
            num_prompt_tokens=self.num_prompt_tokens,
            block_hashes=list(self.block_hashes),
            max_num_tokens=self.max_num_tokens,
            state=self.state,
            num_ready=self.num_ready,
            num_computed=self.num_computed,
            num_cached_tokens=self.num_cached_tokens,
            num_published=self.num_published,
            num_pinned_blocks=self.num_pinned_blocks,
            block_table=self.block_table[:],
            window_blocks=self.window_blocks,
            beams=self.beams,
        )


class OutputTokens(Seq[int]):
    """A view of a sequence's outputs: reading the last ones costs the same at any length."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __len__(self) -> int:
        return self._sequence.num_output_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenArray: ...
    def __getitem__(self, index: int | slice) -> "int | TokenArray":
        """Return a token, or a copy of several."""
        first = self._sequence.num_prompt_tokens
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            return self._sequence.token_ids[first + begin : first + end : step]
        return self._sequence.token_ids[first + range(len(self))[index]]
