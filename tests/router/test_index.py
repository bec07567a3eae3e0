"""The prefix index against a naive one, and its corner cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.block_hash import BlockHashes
from common.ids import BlockHash, WorkerId
from common.kv_events import KvEvents
from router.index import SCRUB_KEYS_PER_CHANGE, PrefixIndex

A, B = WorkerId("a"), WorkerId("b")
WORKERS = [WorkerId(name) for name in "abcd"]


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") * 2)


def blocks(*numbers: int) -> BlockHashes:
    return BlockHashes.of(block(number) for number in numbers)


def store(index: PrefixIndex, worker_id: WorkerId, *numbers: int) -> None:
    index.apply(worker_id, KvEvents(stored=blocks(*numbers)))


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40))
def test_match_of_prefix_closed_workers_is_exact(lengths: list[int], num_blocks: int) -> None:
    index = PrefixIndex()
    for number, length in enumerate(lengths):
        store(index, WorkerId(str(number)), *range(length))
    expected = {WorkerId(str(n)): min(length, num_blocks) for n, length in enumerate(lengths) if length and num_blocks}
    assert index.match(blocks(*range(num_blocks))) == expected


@given(st.sets(st.integers(0, 20)), st.integers(1, 21))
def test_match_with_holes_is_never_too_low_and_count_leading_is_exact(held: set[int], num_blocks: int) -> None:
    index = PrefixIndex()
    store(index, A, *held)
    exact = next((position for position in range(num_blocks) if position not in held), num_blocks)
    hashes = blocks(*range(num_blocks))
    assert index.match(hashes).get(A, 0) >= exact
    assert index.count_leading(A, hashes, at_most=num_blocks) == exact


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_match_of_unknown_blocks_is_empty(num_blocks: int) -> None:
    assert PrefixIndex().match(blocks(*range(num_blocks))) == {}


def test_snapshot_replaces_everything_of_its_worker_only() -> None:
    index = PrefixIndex()
    store(index, A, 0, 1, 2)
    store(index, B, 0, 1)
    index.apply(A, KvEvents(stored=blocks(0), is_snapshot=True))
    assert index.match(blocks(0, 1, 2)) == {A: 1, B: 2}


def test_expected_blocks_match_until_they_expire() -> None:
    index = PrefixIndex()
    index.expect(A, blocks(0, 1), expires_s=10.0)
    assert (index.match(blocks(0, 1, 2)), index.expire(9.9)) == ({A: 2}, 0)
    assert (index.expire(10.0), index.match(blocks(0, 1, 2)), index.num_blocks) == (2, {}, 0)


def test_expected_blocks_that_a_worker_confirms_stay() -> None:
    index = PrefixIndex()
    index.expect(A, blocks(0, 1), expires_s=10.0)
    store(index, A, 0)
    assert (index.expire(99.0), index.match(blocks(0, 1))) == (1, {A: 1})


def test_expecting_blocks_that_are_held_does_not_make_them_expire() -> None:
    index = PrefixIndex()
    store(index, A, 0)
    index.expect(A, blocks(0), expires_s=10.0)
    assert (index.expire(99.0), index.match(blocks(0))) == (0, {A: 1})


def test_expecting_again_prolongs() -> None:
    index = PrefixIndex()
    index.expect(A, blocks(0, 1), expires_s=10.0)
    index.expect(A, blocks(0), expires_s=20.0)
    assert (index.expire(15.0), index.match(blocks(0, 1))) == (1, {A: 1})


def test_retracted_blocks_are_forgotten_unless_confirmed() -> None:
    index = PrefixIndex()
    index.expect(A, blocks(0, 1, 2), expires_s=10.0)
    store(index, A, 0)
    index.retract(A, blocks(0, 1, 2))
    index.retract(B, blocks(0))
    assert (index.num_expected, index.match(blocks(0, 1, 2))) == (0, {A: 1})


def test_removed_expected_block_is_forgotten() -> None:
    index = PrefixIndex()
    index.expect(A, blocks(0), expires_s=10.0)
    index.apply(A, KvEvents(removed=blocks(0)))
    assert (index.num_expected, index.match(blocks(0))) == (0, {})


def test_dropped_worker_is_scrubbed_in_slices_and_its_slot_used_again() -> None:
    index = PrefixIndex()
    store(index, A, *range(SCRUB_KEYS_PER_CHANGE + 10))
    index.drop(A)
    assert index.num_blocks == 10
    assert index.match(blocks(*range(SCRUB_KEYS_PER_CHANGE + 10))) == {}
    store(index, B, 1 << 40)
    assert index.num_blocks == 1
    store(index, A, 1 << 41)
    assert index.match(blocks(1 << 41)) == {A: 1}


class AgainstNaive(RuleBasedStateMachine):
    """Any order of events, expectations and drops: the same answers as a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[WorkerId, set[int]] = {}
        self.expected: dict[tuple[WorkerId, int], float] = {}
        self.now_s = 0.0

    workers = st.sampled_from(WORKERS)
    numbers = st.lists(st.integers(0, 7), max_size=5)

    @rule(worker=workers, stored=numbers, removed=numbers, is_snapshot=st.booleans())
    def apply(self, worker: WorkerId, stored: list[int], removed: list[int], is_snapshot: bool) -> None:
        if is_snapshot:
            self.forget(worker)
        self.index.apply(worker, KvEvents(stored=blocks(*stored), removed=blocks(*removed), is_snapshot=is_snapshot))
        held = self.held.setdefault(worker, set())
        for number in (*removed, *stored):
            self.expected.pop((worker, number), None)
        held -= set(removed)
        held |= set(stored)

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.index.drop(worker)
        self.forget(worker)

    @rule(worker=workers, numbers=numbers)
    def expect(self, worker: WorkerId, numbers: list[int]) -> None:
        self.index.expect(worker, blocks(*numbers), expires_s=self.now_s + 5)
        for number in numbers:
            if number not in self.held.get(worker, set()):
                self.expected[(worker, number)] = self.now_s + 5

    @rule(worker=workers, numbers=numbers)
    def retract(self, worker: WorkerId, numbers: list[int]) -> None:
        self.index.retract(worker, blocks(*numbers))
        for number in numbers:
            self.expected.pop((worker, number), None)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        self.index.expire(self.now_s)
        self.expected = {entry: expires_s for entry, expires_s in self.expected.items() if expires_s > self.now_s}

    def forget(self, worker: WorkerId) -> None:
        self.held.pop(worker, None)
        self.expected = {entry: expires_s for entry, expires_s in self.expected.items() if entry[0] != worker}

    @invariant()
    def same_answers(self) -> None:
        for start in range(3):
            hashes = blocks(*range(start, 8))
            for worker in WORKERS:
                known = self.held.get(worker, set()) | {n for w, n in self.expected if w == worker}
                exact = next((i for i in range(8 - start) if start + i not in known), 8 - start)
                assert self.index.count_leading(worker, hashes, at_most=8) == exact
                assert self.index.match(hashes).get(worker, 0) >= exact
        assert self.index.num_expected == len(self.expected)


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
