"""EngineCore as a state machine: all calls of a worker, in any order, in turn and overlapped.

The fake engine computes a launched step as late as possible and answers with a hash of the pages that it finds. So a
page that gets a new owner too early, or is published with wrong content, gives a wrong token.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis.stateful import invariant

from common.block_hash import BlockHashes
from common.ids import BlockId, WorkerId
from common.kv_events import decode_events, encode_events
from engine.events import Embedded, Tokens
from engine.fake_model import token_kv
from engine.fake_pages import FakeWindow, fake_state
from engine.kv_store import has_windows
from engine.request import EngineRequest
from engine.sequence import SequenceState
from engine.window_ids import WindowIds
from router.fleet.index import PrefixIndex
from tests.builders import BLOCK_SIZE, assert_empty, expected_embedding
from tests.engine.core_calls import CoreCalls
from tests.engine.core_work import Work
from tests.engine.overlap import step


class CoreMachine(CoreCalls):
    @invariant()
    def tokens_are_those_of_the_oracle_each_once_and_in_order(self) -> None:
        for work in self.works:
            for sample in range(work.group.request.sampling.n):
                told = work.told(sample)
                if told:
                    whole = self.whole_answer(work, sample)
                    assert told == whole[: len(told)]

    @invariant()
    def pages_are_held_by_sequences_and_steps_in_flight_only(self) -> None:
        pool = self.core.pool
        held: Counter[int] = Counter()
        for work in self.works:
            for sequence in work.group.sequences:
                held.update(sequence.block_table)
                held.update(sequence.retired_blocks)
                held.update(sequence.landed_blocks)
        for landing, _request in self.landings:
            held.update(landing.block_table)
            held.update(landing.retired_blocks)
        for pin in self.pins:
            held.update(pin.block_ids)
        for block_id in range(pool.num_blocks):
            extra = pool.ref_count(block_id) - held[block_id]  # the source of a copy is held by its step
            assert extra == 0 or (extra > 0 and self.core.num_steps_in_flight), (block_id, extra)

    @invariant()
    def ended_sequences_hold_pages_only_while_a_step_with_them_is_in_flight(self) -> None:
        for work in self.works:
            for sequence in work.group.sequences:
                if sequence.state is SequenceState.FINISHED:
                    assert bool(sequence.num_in_flight) >= bool(sequence.block_table)
                assert sequence.num_in_flight <= self.core.num_steps_in_flight

    @invariant()
    def published_pages_hold_the_kv_of_their_tokens(self) -> None:
        for sequence in (s for work in self.works for s in work.group.sequences):
            self.note_blocks(sequence)
        for block_hash in self.core.pool.snapshot().stored:
            block_id = self.core.pool.block_of(block_hash)
            tokens = self.tokens_of[block_hash]
            start = len(tokens) - BLOCK_SIZE
            expected = [token_kv(tokens[p], p) for p in range(start, len(tokens))]
            assert self.values_of(block_id) == expected
            for page_id in self.window_ids([block_id]):
                self.check_window_page(self.values_of(page_id), tokens)

    @invariant()
    def load_counts_what_is_there(self) -> None:
        load, scheduler = self.core.load(), self.core.scheduler
        running = scheduler.running
        decoding = [s for s in running if s.will_decode and s.num_tokens - s.num_ready == 1]
        starts = [(s, s.num_ready) for s in running if s not in decoding]
        starts += [(s, s.num_expected_cached_tokens) for s in scheduler.waiting]
        assert load.num_decoding == len(decoding)
        assert load.num_pending_prefill_tokens == sum(s.num_tokens - start for s, start in starts)
        pairs = sum(position + 1 for s, start in starts for position in range(start, s.num_tokens))
        assert load.num_pending_prefill_pairs == pairs
        context = sum(s.num_tokens for s in (*running, *scheduler.waiting) if s.will_decode)
        context += sum(s.num_samples * s.num_tokens for s in scheduler.reserved)
        assert load.num_context_tokens == context

    @invariant()
    def expected_prefixes_are_what_a_walk_would_find(self) -> None:
        pool = self.core.pool
        for sequence in (s for work in self.works for s in work.group.sequences):
            reusable = sequence.block_hashes[: sequence.num_reusable_blocks]
            assert pool.num_usable(sequence.block_hashes, len(reusable)) == len(pool.match_prefix(reusable))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.spy.fail_launch_of = None
        self.spy.fail_results_of.discard(len(self.spy.batches))
        for work in self.works:
            if work.kind == "reserve" and work.group.leader.state is SequenceState.RESERVED:
                work.is_ended = True
                self.core.cancel(work.group)
        for landing, _request in self.landings:
            self.core.landings.release(landing)
        for pin in self.pins:
            self.core.landings.unpin(pin)
        for _ in range(len(self.works) + 1):  # in each round at least one more request gets its pages
            self.core.wake()
            self.run_until_idle()
            for work in self.works:
                if work.group.leader.state is SequenceState.HELD:
                    self.core.cancel(work.group)
        assert_empty(self.core)
        for work in self.works:
            if work.collector.failure is not None:
                assert "RuntimeError: no " in str(work.collector.failure.error), "no fault of `Spy`"
                continue
            if work.is_ended:
                continue
            request = work.group.request
            if request.pooling is not None:
                (embedded,) = [event for event in work.collector.events if isinstance(event, Embedded)]
                expected = expected_embedding(request.prompt_token_ids, request.pooling)
                assert embedded.vector.tolist() == expected.tolist()
                continue
            for sample in range(work.group.request.sampling.n):
                if sample in work.ended_samples:
                    continue
                whole = self.whole_answer(work, sample)
                num_first = 0 if work.group.request.sampling.has_beams else 1
                assert work.told(sample) == (whole[:num_first] if work.kind == "prefill" else whole)
            if work.group.request.sampling.num_prompt_logprobs is not None and work.kind != "reserve":
                told = [len(e.prompt_logprobs) for e in work.collector.events if isinstance(e, Tokens)]
                has_output = bool(work.group.request.output_token_ids)
                assert sum(told) == (0 if has_output else len(work.group.request.prompt_token_ids) - 1)

    def check_window_page(self, values: list[int], tokens: Sequence[int]) -> None:
        """Check the window page of a cached block, the last one of some tokens."""
        start = len(tokens) - BLOCK_SIZE
        assert values == [token_kv(tokens[p], p) for p in range(start, len(tokens))]

    def values_of(self, page_id: BlockId) -> list[int]:
        """Return the content of a page."""
        return list(np.frombuffer(self.core.executor.kv.read_blocks([page_id]), dtype="<u8").tolist())

    def window_ids(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Return the window pages of those blocks that have one."""
        kv = self.core.executor.kv
        if not has_windows(kv):
            return []
        pages = [kv.window_page_of[block_id] for block_id in block_ids]
        return [BlockId(kv.num_blocks + page) for page in pages if page >= 0]

    def run_until_idle(self) -> None:
        """Step like the engine thread: a stalled core waits for a command."""
        for _ in range(1000):
            if not self.core.has_work:
                return
            step(self.core)
        raise AssertionError("still busy after 1000 steps")

    def whole_answer(self, work: Work, sample: int) -> list[int]:
        """Return the part of the answer that this core generates."""
        request: EngineRequest = work.group.request
        return work.answer(sample)[0 if request.output_token_ids else work.first_index :]


class WindowMachine(CoreMachine):
    """A core whose model has a layer with a window of two blocks or so."""

    window = FakeWindow(num_tokens=5, num_pages=24)

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(chunk_keys=4)

    @invariant()
    def routers_know_how_much_of_each_text_can_be_reused(self) -> None:
        worker, pool, shape = WorkerId("w"), self.core.pool, self.core.executor.kv.shape
        self.index.apply(worker, decode_events(encode_events(pool.drain_events())), window=shape.block_window)
        fresh = PrefixIndex()
        fresh.apply(worker, decode_events(encode_events(pool.snapshot())), window=shape.block_window)
        for sequence in (s for work in self.works for s in work.group.sequences):
            num_reusable, hashes = sequence.num_reusable_blocks, BlockHashes.of(sequence.block_hashes)
            for index in (self.index, fresh):
                matches = index.match(hashes, num_usable=num_reusable)
                assert matches.verify(worker)
                assert matches.get(worker) == matches.count_present(worker) == pool.num_usable(hashes, num_reusable)

    @invariant()
    def window_pages_are_needed_by_sequences_landings_and_pins_only(self) -> None:
        windows = self.core.pool.windows
        assert windows is not None
        needed: set[int] = set()
        for sequence in (s for work in self.works for s in work.group.sequences):
            needed.update(sequence.block_table[i] for i in sequence.window_blocks)
            needed.update(sequence.landed_blocks[i] for i in sequence.landed_windows)
        for landing, _request in self.landings:
            needed.update(landing.block_table[i] for i in landing.window_blocks)
        for pin in self.pins:
            needed.update(pin.block_ids[i] for i in pin.window_blocks)
        assert windows.num_needed == len(needed)
        assert windows.num_needed <= windows.num_promised
        assert windows.num_promised <= windows.num_pages or not windows.is_scarce


class StateMachine(WindowMachine):
    """A core whose model has a recurrent layer."""

    window = FakeWindow(num_tokens=1, num_pages=14, is_state=True)

    def check_window_page(self, values: list[int], tokens: Sequence[int]) -> None:
        """See `CoreMachine`: it holds the state at the block's end."""
        assert values[:2] == fake_state([token_kv(token_id, p) for p, token_id in enumerate(tokens)]).tolist()

    def write_windows(self, windows: WindowIds, indexes: range, token_ids: Sequence[int]) -> None:
        """See `CoreCalls`: the states at the ends of these blocks."""
        for i, page_id in enumerate(windows.ids, windows.first_block):
            if i in indexes:
                known = token_ids[: (i + 1) * BLOCK_SIZE]
                page = np.zeros(BLOCK_SIZE, dtype="<u8")
                page[:2] = fake_state([token_kv(token_id, p) for p, token_id in enumerate(known)])
                self.core.executor.kv.write_blocks([page_id], memoryview(page.tobytes()))


StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStates = StateMachine.TestCase


class ChunkMachine(WindowMachine):
    """A core whose model has a layer that sees chunks, which end inside blocks."""

    window = FakeWindow(num_tokens=6, num_pages=24, is_chunk=True)


ChunkMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestChunks = ChunkMachine.TestCase
WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWindows = WindowMachine.TestCase
CoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCore = CoreMachine.TestCase
