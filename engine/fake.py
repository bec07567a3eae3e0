"""A deterministic engine without torch, whose answers depend on every byte of KV that it reads.

The KV of a token is 8 bytes: a hash of the token and its position. The next token is a hash over the KV *found in the
pages* of all earlier positions, through the block table. So a wrong page, a missed copy-on-write, a corrupt transfer
or an off-by-one slot changes the answer, as in a real model. Scheduler, block pool and protocol are real. With a
window, the KV is in window pages, too, and that of the latest tokens is read there.

As on a device, a launched step is computed later: when its results are requested, on the pages as they are then. So a
page that is given away while a step in flight may still use it changes the answer too.
"""

import enum
import os
import threading
import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from common.sampling import SamplingParams
from common.tokens import TokenArray
from engine.executor import Sampled, ScheduledSequence, StepResult
from engine.fake_model import HIDDEN_SIZE, choose, context_state, hidden_state, made_up_logprobs, token_kv
from engine.fake_pages import FakeKvStore, FakeWindow
from engine.kv_store import KvStore
from engine.text.grammar import Allowed
from engine.work import StepFloors

FAULTS_ENV = "KVRELAY_FAKE_FAULTS"
"""Set to 1 in a worker's environment, it makes the tokens of `FaultToken` in a prompt do what they say: for tests."""
_HAS_FAULTS = os.environ.get(FAULTS_ENV) == "1"


class FaultToken(enum.IntEnum):
    """Tokens that break the engine that computes them."""

    CRASH = 1
    """The process dies as if by a bug in a kernel."""
    HANG = 2
    """The step never ends."""
    RAISE = 3
    """The step fails."""


@dataclass(slots=True)
class _Chunk:
    """A scheduled sequence, and copies of its data that change after the launch."""

    item: ScheduledSequence
    start: int
    token_index: int
    token_ids: TokenArray
    """Tokens of the chunk, and the next one if it is known; empty when the input is pending."""
    pages: list[int]
    """Those of the block table, `with_windows`."""
    allowed: list[Allowed] | None
    """Tokens that its grammar allows next, and behind each drafted one; None without one, or until they are known."""
    branches: "list[_Chunk]"
    """Its branches, each with the whole path of drafted tokens."""
    first_pooled: int | None

    @classmethod
    def of(cls, item: ScheduledSequence, store: FakeKvStore) -> "_Chunk":
        sequence = item.sequence
        start = sequence.num_computed
        known = sequence.token_ids[start : start + item.num_new_tokens + 1]
        index, pooled = item.token_index, item.first_pooled

        def chunk(draft: TokenArray, table: "array[int]", branches: "list[_Chunk]") -> "_Chunk":
            allowed = item.allowed(draft) if item.num_samples else None
            return cls(item, start, index, known + draft, store.with_windows(table), allowed, branches, pooled)

        pairs = zip(item.branches, item.paths, strict=True)
        branches = [chunk(path, branch.block_table, []) for branch, path in pairs]
        return chunk(item.draft, sequence.block_table, branches)

    @property
    def sampling(self) -> SamplingParams:
        return self.item.sequence.request.sampling


class FakeStep:
    """A launched step."""

    def __init__(self, store: FakeKvStore, chunks: list[_Chunk], previous: "FakeStep | None", ready_s: float) -> None:
        self.ready_s = ready_s
        """Time at which it is over, on the monotonic clock."""
        self._store = store
        self._chunks = chunks
        self._previous = previous
        self._results: list[StepResult] | None = None

    def choose(self) -> None:
        """Look at what grammars allow, now that the tokens of the step before are known."""
        for chunk in self._chunks:
            if chunk.item.chooses_late:
                chunk.allowed = chunk.item.allowed(chunk.item.draft)

    def compute(self) -> None:
        """Write KV and sample. Runs after all work that was launched before it."""
        tokens = self._previous.sampled_token_ids() if self._previous is not None else []
        self._previous = None
        self._results = [self._one(chunk, tokens) for chunk in self._chunks]

    def sampled_token_ids(self) -> list[int]:
        """Return the tokens of all samples, in order."""
        assert self._results is not None, "steps are computed in the order in which they are launched"
        return [sampled.token_id for result in self._results for sampled in result.sampled]

    def results(self) -> list[StepResult]:
        """Wait until the step is over, and compute it."""
        if (seconds := self.ready_s - time.monotonic()) > 0:
            time.sleep(seconds)  # even one of 0 s gives the core away
        while self._results is None:
            self._store.queue.popleft()()
        pairs = zip(self._chunks, self._results, strict=True)
        return [_walked(chunk.item, result) if chunk.item.draft else result for chunk, result in pairs]

    def _one(self, chunk: _Chunk, previous_token_ids: list[int]) -> StepResult:
        item, end = chunk.item, chunk.start + chunk.item.num_new_tokens
        token_ids = chunk.token_ids if item.input_row is None else [previous_token_ids[item.input_row]]
        if _HAS_FAULTS:
            _commit(token_ids[: end - chunk.start])
        values = [token_kv(token_id, p) for p, token_id in zip(range(chunk.start, end), token_ids, strict=False)]
        self._store.write_tokens(chunk.pages, chunk.start, values)
        result = StepResult(sampled=[], prompt_logprobs=[])
        if item.num_samples:
            contexts = [self._store.gather(chunk.pages, end - i) for i in range(len(item.draft), 0, -1)]
            first, *others = map(context_state, [*contexts, self._store.context(chunk.pages, end)])
            result.sampled = [_sample(chunk, first, sample=j) for j in range(item.num_samples)]
            result.sampled += [_sample(chunk, state, num_drafted=i) for i, state in enumerate(others, 1)]
            for branch, path in zip(item.branches, chunk.branches, strict=True):
                result.sampled += self._branch(path, branch.depth)
        num_top = chunk.sampling.num_prompt_logprobs
        if num_top is not None:
            for position in range(chunk.start, min(end, item.sequence.num_prompt_tokens - 1)):
                state = context_state(self._store.gather(chunk.pages, position + 1))
                result.prompt_logprobs.append(made_up_logprobs(state, token_ids[position + 1 - chunk.start], num_top))
        if chunk.first_pooled is not None:
            ends = range(chunk.start + chunk.first_pooled + 1, end + 1)
            rows = [hidden_state(self._store.gather(chunk.pages, each)) for each in ends]
            result.pooled = np.sum(rows, axis=0, dtype=np.float32)
        return result

    def _branch(self, path: _Chunk, depth: int) -> list[Sampled]:
        """Write a branch's pages; return the tokens sampled behind those that only it has."""
        values = [token_kv(token_id, position) for position, token_id in enumerate(path.token_ids, path.start)]
        self._store.write_tokens(path.pages, path.start, values)
        contexts = ((i, path.start + 1 + i) for i in range(depth + 1, len(path.token_ids)))
        return [_sample(path, context_state(self._store.gather(path.pages, end)), num_drafted=i) for i, end in contexts]


def _walked(item: ScheduledSequence, result: StepResult) -> StepResult:
    """Return a copy with the tokens that count: the next step counts rows by all that are sampled."""
    walk = item.walk(result.sampled)
    return replace(result, sampled=[result.sampled[place] for place in walk.places], branch=walk.branch)


def _commit(token_ids: Iterable[int]) -> None:
    """Commit the faults among some tokens."""
    for token_id in token_ids:
        match token_id:
            case FaultToken.CRASH:
                os.abort()
            case FaultToken.HANG:
                threading.Event().wait()
            case FaultToken.RAISE:
                raise RuntimeError("a fault of the fake engine, as asked for")


class FakeExecutor:
    """Executor of the fake engine; a step takes `step_s` seconds of wall time, one after the other."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int = 4096,
        step_s: float = 0.0,
        max_steps_in_flight: int = 2,
        model_name: str = "fake",
    ) -> None:
        self._store = FakeKvStore(num_blocks, block_size)
        self.kv: KvStore = self._store
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.hidden_size = HIDDEN_SIZE
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.model_name = model_name
        self.max_steps_in_flight = max_steps_in_flight
        self.verifies_drafts = True
        self.compiles_steps = False
        self.exact_resume = True
        self.floors: StepFloors | None = None
        self._step_s = step_s
        self._last: FakeStep | None = None

    def add_window(self, window: FakeWindow) -> None:
        """Give the model a layer with a window, or a recurrent one. Before it gets an engine.

        Its steps then run one after the other. A state cannot go back: with one, no drafts are verified.
        """
        self.kv = self._store = FakeKvStore(self.kv.num_blocks, self.kv.shape.block_size, window)
        self.max_steps_in_flight = 1
        self.verifies_drafts = not window.is_state

    def launch(self, batch: Seq[ScheduledSequence]) -> FakeStep:
        """Queue the step."""
        now_s = time.monotonic()
        begin_s = now_s if self._last is None else max(now_s, self._last.ready_s)
        chunks = [_Chunk.of(item, self._store) for item in batch]
        self._last = FakeStep(self._store, chunks, self._last, begin_s + self._step_s)
        self._store.queue.append(self._last.compute)
        return self._last


def _sample(chunk: _Chunk, state: int, *, sample: int = 0, num_drafted: int = 0) -> Sampled:
    """Return the token that one of the samples, or the only one behind some drafted tokens, gets in a state."""
    return choose(
        chunk.sampling,
        state,
        sample_index=chunk.item.sequence.sample_index + sample,
        index=chunk.token_index + num_drafted,
        allowed=None if chunk.allowed is None else chunk.allowed[num_drafted],
    )
