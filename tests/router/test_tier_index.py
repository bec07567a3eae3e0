"""The prefix index of workers with tiers, against a naive one: what they hold, and how much of it is in pages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.ids import WorkerId
from common.kv_events import KvEvents
from engine.window import BlockWindow, Window
from router.fleet.index import PrefixIndex
from tests.router.test_index import A, B, blocks, store

NUM_BLOCKS = 8
WINDOWS = {
    WorkerId("plain"): None,
    WorkerId("other"): None,
    WorkerId("states"): BlockWindow(window=Window(num_tokens=1), block_size=2),
}
TEXT = blocks(*range(NUM_BLOCKS))


class AgainstNaive(RuleBasedStateMachine):
    """Any order of events, expectations and drops: the same answers as sets of blocks, and of those in tiers only."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(chunk_keys=2)
        self.held: dict[WorkerId, set[int]] = {worker: set() for worker in WINDOWS}
        self.offloaded: dict[WorkerId, set[int]] = {worker: set() for worker in WINDOWS}
        self.expected: dict[tuple[WorkerId, int], float] = {}
        """Times until which blocks are expected in pages: those that are not held, and those that are offloaded."""
        self.now_s = 0.0

    workers = st.sampled_from(list(WINDOWS))
    numbers = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=6)

    @rule(worker=workers, stored=numbers, removed=numbers, offloaded=numbers, snapshot=st.booleans())
    def apply(
        self, worker: WorkerId, stored: list[int], removed: list[int], offloaded: list[int], snapshot: bool
    ) -> None:
        held = self.held[worker] if not snapshot else set()
        held = held - set(removed) | set(stored)
        offloaded = [number for number in offloaded if number in held]  # no other block of a worker can be
        events = KvEvents(
            stored=blocks(*stored), removed=blocks(*removed), offloaded=blocks(*offloaded), is_snapshot=snapshot
        )
        self.index.apply(worker, events, window=WINDOWS[worker])
        if snapshot:
            self.forget(worker)
        self.held[worker] = held
        self.offloaded[worker] = (self.offloaded[worker] - {*removed, *stored}) | set(offloaded)
        for number in (*removed, *stored):
            self.expected.pop((worker, number), None)
        for number in offloaded:
            if number in held:
                self.expected.pop((worker, number), None)

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.index.drop(worker)
        self.forget(worker)
        self.held[worker] = set()

    @rule(worker=workers, num=st.integers(0, NUM_BLOCKS))
    def expect(self, worker: WorkerId, num: int) -> None:
        self.index.expect(worker, TEXT[:num], expires_s=self.now_s + 5)
        for number in range(num):
            if number not in self.held[worker] or number in self.offloaded[worker]:
                self.expected[worker, number] = self.now_s + 5

    @rule(worker=workers, numbers=numbers)
    def retract(self, worker: WorkerId, numbers: list[int]) -> None:
        self.index.retract(worker, blocks(*numbers))
        for number in numbers:
            self.expected.pop((worker, number), None)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        self.index.expire(self.now_s)
        self.expected = {entry: until_s for entry, until_s in self.expected.items() if until_s > self.now_s}

    def forget(self, worker: WorkerId) -> None:
        self.offloaded[worker] = set()
        self.expected = {entry: until_s for entry, until_s in self.expected.items() if entry[0] != worker}

    @invariant()
    def same_answers(self) -> None:
        for worker in WINDOWS:
            coming = {number for owner, number in self.expected if owner == worker}
            known, marked = self.held[worker] | coming, self.offloaded[worker] - coming
            exact = next((i for i in range(NUM_BLOCKS) if i not in known), NUM_BLOCKS)
            in_pages = next((i for i in range(exact) if i in marked), exact)
            matches = self.index.match(TEXT)
            said = matches.get(worker), matches.num_in_pages(worker)
            assert said[0] >= exact
            while not matches.verify(worker):
                assert said != (exact, in_pages), "it was right"
                said = matches.get(worker), matches.num_in_pages(worker)
            assert (matches.get(worker), matches.num_in_pages(worker)) == (exact, in_pages) == said


AgainstNaive.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAgainstNaive = AgainstNaive.TestCase


def test_number_in_pages_costs_the_logarithm_of_the_blocks() -> None:
    index, prompt = PrefixIndex(), range(4096)
    store(index, A, *prompt)
    index.apply(B, KvEvents(stored=blocks(*prompt), offloaded=blocks(*prompt[1000:])))
    looks: list[int] = []

    class Counting(dict[int, int]):
        def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
            looks.append(key)
            return super().get(key, default)

    index._values = Counting(index._values)  # noqa: SLF001
    matches = index.match(blocks(*prompt))
    assert (matches[A], matches[B]) == (4096, 4096)
    looks.clear()
    assert (matches.num_in_pages(A), len(looks)) == (4096, 0)
    assert (matches.num_in_pages(B), len(looks)) == (1000, 12)
    assert matches.num_in_pages(WorkerId("unknown")) == 0


def test_slots_of_tiers_are_scrubbed_and_used_again() -> None:
    index = PrefixIndex(chunk_keys=2)
    for turn in range(20):
        index.apply(A, KvEvents(stored=blocks(*range(6)), offloaded=blocks(turn % 6, 5), is_snapshot=True))
        matches = index.match(blocks(*range(6)))
        matches.num_in_pages(A)
        matches.verify(A)
        assert matches.num_in_pages(A) == turn % 6
        for _ in range(9):
            index.apply(B, KvEvents(is_snapshot=False))
    assert len(index._slots.owners) <= 6  # noqa: SLF001
