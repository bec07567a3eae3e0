"""The prefix index of workers whose models have window pages, against a naive one, and what such workers can use."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.ids import WorkerId
from common.kv_events import KvEvents
from engine.window import BlockWindow, Window
from router.fleet.index import PrefixIndex
from router.fleet.prefix_groups import MAX_LOOKS, usable_groups
from tests.router.test_index import blocks

PLAIN, STATES, WINDOW, CHUNKS = map(WorkerId, ("plain", "states", "window", "chunks"))
BLOCK_SIZE, NUM_BLOCKS = 2, 8
STATE = BlockWindow(window=Window(num_tokens=1), block_size=BLOCK_SIZE)
WINDOWS = {
    PLAIN: None,
    STATES: STATE,
    WINDOW: BlockWindow(window=Window(num_tokens=5), block_size=BLOCK_SIZE),
    CHUNKS: BlockWindow(window=Window(num_tokens=5, is_chunk=True), block_size=BLOCK_SIZE),
}


def needed(num_blocks: int, window: BlockWindow | None) -> set[int]:
    """Return the blocks with tokens that the last token of leading ones sees."""
    if window is None or not num_blocks:
        return set()
    last, size = num_blocks * BLOCK_SIZE - 1, window.window.num_tokens
    seen = range(last + 1)
    if window.window.is_chunk:
        return {token // BLOCK_SIZE for token in seen if token // size == last // size}
    return {token // BLOCK_SIZE for token in seen[-size:]}


def usable_end(num_held: int, pages: set[int], window: BlockWindow | None) -> int:
    """Return the most blocks, of the first `num_held` ones, behind which a worker with these window pages begins."""
    return next(end for end in range(num_held, -1, -1) if needed(end, window) <= pages)


def leading(numbers: set[int], most: int) -> int:
    return next((i for i in range(most) if i not in numbers), most)


class AgainstNaive(RuleBasedStateMachine):
    """Any order of events, expectations and drops: the same answers as sets of blocks, and of window pages."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(chunk_keys=2)
        self.held: dict[WorkerId, set[int]] = {worker: set() for worker in WINDOWS}
        self.pages: dict[WorkerId, set[int]] = {worker: set() for worker in WINDOWS}
        self.expected: dict[tuple[WorkerId, str, int], float] = {}
        """Times until which blocks ("block") and window pages ("page") are expected, beside those that are there."""
        self.now_s = 0.0
        for worker in WINDOWS:
            self.apply(worker, [], [], [], [], True)

    workers = st.sampled_from(list(WINDOWS))
    numbers = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=8)

    @rule(worker=workers, stored=numbers, removed=numbers, paged=numbers, unpaged=numbers, is_snapshot=st.booleans())
    def apply(
        self,
        worker: WorkerId,
        stored: list[int],
        removed: list[int],
        paged: list[int],
        unpaged: list[int],
        is_snapshot: bool,
    ) -> None:
        unpaged = [number for number in unpaged if number not in paged]
        events = KvEvents(
            stored=blocks(*stored),
            removed=blocks(*removed),
            paged=blocks(*paged),
            unpaged=blocks(*unpaged),
            is_snapshot=is_snapshot,
        )
        if is_snapshot:
            self.forget(worker)
        self.index.apply(worker, events, window=WINDOWS[worker])
        self.settle(worker, ("block", "page"), {*removed, *stored})
        self.held[worker] = self.held[worker] - set(removed) | set(stored)
        self.pages[worker] -= {*removed, *stored}
        if WINDOWS[worker]:
            known = self.known(worker, "block")
            self.settle(worker, ("page",), {*paged, *unpaged})
            self.pages[worker] = (self.pages[worker] | set(paged) & known) - set(unpaged)

    @rule(worker=workers, first=st.integers(0, NUM_BLOCKS - 1), num=st.integers(0, NUM_BLOCKS))
    def expect(self, worker: WorkerId, first: int, num: int) -> None:
        numbers = list(range(first, min(NUM_BLOCKS, first + num)))
        self.index.expect(worker, blocks(*numbers), expires_s=self.now_s + 5)
        at_end = {numbers[i] for i in needed(len(numbers), WINDOWS[worker])}
        paged = [number for number in at_end if number not in self.held[worker]]
        for kind, those, there in (("block", numbers, self.held), ("page", paged, self.pages)):
            self.expected |= {(worker, kind, n): self.now_s + 5 for n in those if n not in there[worker]}

    @rule(worker=workers, numbers=numbers)
    def retract(self, worker: WorkerId, numbers: list[int]) -> None:
        self.index.retract(worker, blocks(*numbers))
        gone = {number for number in numbers if (worker, "block", number) in self.expected}
        self.settle(worker, ("block", "page"), set(numbers))
        self.pages[worker] -= gone

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        self.index.expire(self.now_s)
        for worker, kind, number in [entry for entry, until_s in self.expected.items() if until_s <= self.now_s]:
            self.expected.pop((worker, kind, number), None)
            if kind == "block":
                self.settle(worker, ("page",), {number})
                self.pages[worker].discard(number)

    def settle(self, worker: WorkerId, kinds: tuple[str, ...], numbers: set[int]) -> None:
        for entry in [(worker, kind, number) for kind in kinds for number in numbers]:
            self.expected.pop(entry, None)

    def forget(self, worker: WorkerId) -> None:
        self.held[worker], self.pages[worker] = set(), set()
        self.settle(worker, ("block", "page"), set(range(NUM_BLOCKS)))

    def known(self, worker: WorkerId, kind: str) -> set[int]:
        there = (self.held if kind == "block" else self.pages)[worker]
        return there | {number for owner, each, number in self.expected if (owner, each) == (worker, kind)}

    @invariant()
    def same_answers(self) -> None:
        text = blocks(*range(NUM_BLOCKS))
        for num_usable in (NUM_BLOCKS, NUM_BLOCKS - 1, NUM_BLOCKS // 2):
            for worker, window in WINDOWS.items():
                matches = self.index.match(text, num_usable=num_usable)
                most = num_usable if window else NUM_BLOCKS

                blocks_known, pages_known = self.known(worker, "block"), self.known(worker, "page")
                exact = usable_end(leading(blocks_known, most), pages_known, window)
                assert matches.get(worker) >= exact
                was_exact = matches.get(worker) == exact
                assert matches.verify(worker) is was_exact
                assert matches.get(worker) == exact
                present = usable_end(leading(self.held[worker], most), self.pages[worker], window)
                assert self.index.match(text, num_usable=num_usable).count_present(worker) == present


AgainstNaive.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAgainstNaive = AgainstNaive.TestCase


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 8))), min_size=1, max_size=4),
    st.sampled_from([window for window in WINDOWS.values() if window is not None]),
)
def test_workers_begin_behind_the_last_whole_window_of_each(
    workers: list[tuple[int, set[int]]], window: BlockWindow
) -> None:
    ends: dict[int, int] = {}
    for slot, (num_held, _pages) in enumerate(workers):
        ends[num_held] = ends.get(num_held, 0) | 1 << slot
    groups = usable_groups(
        sorted(ends.items()),
        lambda i: sum(1 << slot for slot, (_held, pages) in enumerate(workers) if i in pages),
        window,
    )
    found = {slot: end for end, mask in groups for slot in range(len(workers)) if mask >> slot & 1}
    expected = {slot: usable_end(num_held, pages, window) for slot, (num_held, pages) in enumerate(workers)}
    assert found == {slot: end for slot, end in expected.items() if end}
    assert groups == sorted(groups)


def test_search_for_a_window_ends_after_a_number_of_looks() -> None:
    looks: list[int] = []

    def paged(i: int) -> int:
        looks.append(i)
        return i & 1

    window = BlockWindow(window=Window(num_tokens=5), block_size=BLOCK_SIZE)
    assert usable_groups([(10 * MAX_LOOKS, 1)], paged, window) == []
    assert len(looks) < 3 * MAX_LOOKS


def test_blocks_forgotten_for_memory_take_their_window_pages_with_them() -> None:
    index = PrefixIndex(max_blocks=4, chunk_keys=1)
    for first in (0, 4):
        numbers = blocks(*range(first, first + 4))
        index.apply(STATES, KvEvents(stored=numbers, paged=numbers), window=STATE)
    index.apply(STATES, KvEvents(paged=blocks(*range(4))), window=STATE)
    assert index.num_blocks == 4
    index.apply(STATES, KvEvents(stored=blocks(0)), window=STATE)
    assert (index.match(blocks(0)).longest, index.match(blocks(0), num_usable=1).longest) == (1, 0)
