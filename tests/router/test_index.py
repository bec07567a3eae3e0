"""The prefix index against a naive one, and its corner cases."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.block_hash import BlockHashes
from common.ids import BlockHash, WorkerId
from common.kv_events import KvEvents
from router.fleet.block_ages import EvictedBlocks
from router.fleet.index import CHUNK_KEYS, PrefixIndex

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


def test_dropped_worker_is_scrubbed_in_slices_and_its_slot_used_again() -> None:
    index = PrefixIndex()
    store(index, A, *range(CHUNK_KEYS + 10))
    index.drop(A)
    assert index.num_blocks == 10
    assert index.match(blocks(*range(CHUNK_KEYS + 10))) == {}
    store(index, B, 1 << 40)
    assert index.num_blocks == 1
    store(index, A, 1 << 41)
    assert index.match(blocks(1 << 41)) == {A: 1}


class AgainstNaive(RuleBasedStateMachine):
    """Any order of events, expectations and drops: the same answers as a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(chunk_keys=2)
        self.held: dict[WorkerId, set[int]] = {}
        self.expected: dict[tuple[WorkerId, int], float] = {}
        self.now_s = 0.0
        self.start = 0
        """First block of the prompt that is looked up; another one after each step."""

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
        start = self.start = (self.start + 1) % 3
        hashes = blocks(*range(start, 8))
        for worker in WORKERS:
            known = self.held.get(worker, set()) | {n for w, n in self.expected if w == worker}
            exact = next((i for i in range(8 - start) if start + i not in known), 8 - start)
            matches = self.index.match(hashes)
            assert matches.get(worker) >= exact
            assert matches.get(worker) == dict(matches).get(worker, 0)
            was_exact = matches.get(worker) == exact
            assert matches.verify(worker) is was_exact
            assert matches.get(worker) == exact
            confirmed = self.held.get(worker, set())
            present = next((i for i in range(exact) if start + i not in confirmed), exact)
            assert self.index.match(hashes).count_present(worker) == present
        holders = list(self.index.match(hashes).longest_holders())
        assert {holder: num_blocks for num_blocks, holder in holders} == self.index.match(hashes)
        assert [num_blocks for num_blocks, _ in holders] == sorted((n for n, _ in holders), reverse=True)
        assert self.index.num_expected == len(self.expected)


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.lists(st.integers(0, 30), max_size=6)), max_size=30))
def test_index_over_its_limit_forgets_what_was_used_longest_ago(uses: list[tuple[WorkerId, list[int]]]) -> None:
    index = PrefixIndex(max_blocks=8, chunk_keys=1)  # with such chunks the order is exact
    order: dict[int, set[WorkerId]] = {}
    for worker, numbers in uses:
        store(index, worker, *numbers)
        for number in numbers:
            order[number] = order.pop(number, set()) | {worker}
            while len(order) > 8:
                del order[next(iter(order))]
        for number in range(31):
            assert dict(index.match(blocks(number))) == dict.fromkeys(order.get(number, ()), 1)
    assert index.num_blocks == len(order)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 30), max_size=9), max_size=40), st.integers(1, 5))
def test_index_over_its_limit_keeps_the_latest_blocks_whatever_the_chunks(
    batches: list[list[int]], chunk_keys: int
) -> None:
    index = PrefixIndex(max_blocks=10, chunk_keys=chunk_keys)
    for batch in batches:
        store(index, A, *batch)
        assert index.num_blocks <= 10
        assert all(index.match(blocks(number)) == {A: 1} for number in batch[-1:])
        index.apply(A, KvEvents(removed=blocks(*batch[:2])))


def test_routing_to_blocks_keeps_them_from_being_forgotten() -> None:
    index = PrefixIndex(max_blocks=4, chunk_keys=1)
    store(index, A, 0, 1, 2, 3)
    index.expect(A, blocks(0, 1), expires_s=10.0)
    store(index, B, 4, 5)
    assert [dict(index.match(blocks(number))) for number in range(6)] == [{A: 1}, {A: 1}, {}, {}, {B: 1}, {B: 1}]
    assert index.num_evicted == 2


def test_entries_of_removed_and_used_again_blocks_do_not_pile_up() -> None:
    index = PrefixIndex(chunk_keys=16)
    for turn in range(400):
        store(index, A, *range(turn % 7, turn % 7 + 20))
        index.apply(A, KvEvents(removed=blocks(*range(turn % 3, 10))))
    assert index._ages.num_entries <= 2 * 30 + 6 * 16  # noqa: SLF001


def test_matches_have_groups_of_workers() -> None:
    index = PrefixIndex()
    workers = [WorkerId(f"w{number}") for number in range(100)]
    for worker in workers:
        store(index, worker, *range(4))
    store(index, workers[7], *range(4, 9))
    matches = index.match(blocks(*range(10)))
    assert [(num_blocks, workers.bit_count()) for num_blocks, workers in matches.groups] == [(4, 99), (9, 1)]
    assert (matches.longest, len(matches), matches.get(workers[7])) == (9, 100, 9)
    assert matches.get(WorkerId("unknown")) == 0


def test_matches_outlive_a_change_of_the_workers() -> None:
    index = PrefixIndex()
    store(index, A, 0)
    matches = index.match(blocks(0))
    index.drop(A)
    store(index, B, 0)
    assert matches == {A: 1}


def test_evicted_keys_in_a_row_count_until_the_first_that_was_not() -> None:
    evicted = EvictedBlocks()
    evicted.add([1, 2, 3, 5])
    assert evicted.count_leading([1, 2, 3, 4, 5], start=0) == 3
    assert evicted.count_leading([1, 2, 3, 4, 5], start=4) == 1
    assert evicted.count_leading([9, 1], start=0) == 0


def test_oldest_evictions_are_forgotten_and_a_key_counts_from_its_last_one() -> None:
    evicted = EvictedBlocks(capacity=2)
    evicted.add([1, 2, 1, 3])
    assert [evicted.count_leading([key], start=0) for key in (1, 2, 3)] == [1, 0, 1]


def test_block_is_evicted_when_its_last_holder_gives_it_up() -> None:
    index, hashes = PrefixIndex(), blocks(1, 2)
    for worker_id in (A, B):
        index.apply(worker_id, KvEvents(stored=hashes))
    index.apply(A, KvEvents(removed=hashes))
    assert index.evicted.count_leading(hashes.keys, start=0) == 0
    index.apply(B, KvEvents(removed=hashes))
    assert index.evicted.count_leading(hashes.keys, start=0) == 2


def test_worker_that_is_lost_has_evicted_nothing() -> None:
    index, hashes = PrefixIndex(), blocks(1, 2)
    index.apply(A, KvEvents(stored=hashes))
    index.drop(A)
    assert index.evicted.count_leading(hashes.keys, start=0) == 0
