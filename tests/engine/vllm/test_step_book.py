"""Each block of a prompt is stored once when it is final, a pulled prompt is loaded once, and the worker hears it."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import hash_blocks, hash_root
from common.ids import BlockHash
from common.timing import StepShape
from engine.vllm.cache_mirror import CacheMirror, salt_of
from engine.vllm.errands import BlocksStored, Errand, ReportReader, encode_report
from engine.vllm.step_book import StepBook
from tests.engine.vllm.fake_vllm import step

BLOCK_SIZE = 4


class Scheduler:
    """The part of vLLM's scheduler that a book sees: requests by id, with pages and computed tokens."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.book = StepBook(
            block_size=BLOCK_SIZE,
            pool=lambda: SimpleNamespace(take_events=self.take_events, get_num_free_blocks=lambda: 7),
            tables=lambda request_id: self.requests[request_id].block_ids,
        )

    def take_events(self) -> list[Any]:
        taken, self.events = self.events, []
        return taken

    def add(self, request_id: str, num_prompt_tokens: int, errand: Errand) -> Any:
        request = SimpleNamespace(
            request_id=request_id,
            kv_transfer_params=errand.to_params(),
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=0,
            block_ids=[100 + i for i in range(-(-num_prompt_tokens // BLOCK_SIZE))],
        )
        self.requests[request_id] = request
        self.book.opened(request)
        return request

    def step(self, *preempted: str, **num_tokens: int) -> Any:
        errands, begun = self.book.plan(
            SimpleNamespace(num_scheduled_tokens=num_tokens, preempted_req_ids=set(preempted)), self.requests
        )
        for request_id, count in num_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        [again] = ReportReader().feed(encode_report(begun))
        assert again == begun
        return errands, begun


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2))
def test_every_block_of_a_prompt_is_stored_once_in_order_whatever_the_chunks(chunks: list[int], cached: int) -> None:
    scheduler = Scheduler()
    num_tokens = sum(chunks) + cached * BLOCK_SIZE
    slots = tuple(range(-(-num_tokens // BLOCK_SIZE)))
    request = scheduler.add("a", num_tokens, Errand(key=1, region_path="r", slots=slots, stores=True))
    request.num_computed_tokens = cached * BLOCK_SIZE
    stored: list[int] = []
    for chunk in chunks:
        errands, _ = scheduler.step(a=chunk)
        for store in errands.stores:
            assert store.block_ids == tuple(100 + slot for slot in store.slots)
            assert len(store.slots) * BLOCK_SIZE <= store.num_tokens + BLOCK_SIZE - 1
            stored += store.slots
        assert len(stored) == (
            len(slots) if request.num_computed_tokens == num_tokens else request.num_computed_tokens // BLOCK_SIZE
        )
    assert tuple(stored) == slots


def test_a_pulled_prompt_is_loaded_once_and_never_after_a_preemption() -> None:
    """Its slots belong to another request by then."""
    scheduler = Scheduler()
    request = scheduler.add("a", 11, Errand(key=1, region_path="r", slots=(5, 6, 7), num_loaded=10))
    assert scheduler.book.num_matched(request, 4) == 6
    assert scheduler.book.num_matched(request, 4) == 6, "vLLM asks again while there is no room"
    scheduler.book.allocated(request, request.block_ids, 6)
    request.num_computed_tokens = 10
    errands, begun = scheduler.step(a=1)
    [load] = errands.loads
    assert (load.slots, load.block_ids, load.num_tokens) == ((6, 7), (101, 102), 10)
    assert begun.started == ((1, 10),)
    request.num_computed_tokens = 0
    assert scheduler.book.num_matched(request, 0) == 0
    assert not scheduler.step(a=11)[0].loads


def test_a_prompt_preempted_in_its_middle_is_stored_once() -> None:
    """Its first blocks may be on their way to a puller by then."""
    scheduler = Scheduler()
    request = scheduler.add("a", 12, Errand(key=1, region_path="r", slots=(5, 6, 7), stores=True))
    copies = [*scheduler.step(a=9)[0].stores]
    request.num_computed_tokens = 0
    for num_tokens in (4, 7, 1):
        copies += scheduler.step(a=num_tokens)[0].stores
    assert [copy.slots for copy in copies] == [(5, 6), (7,)]
    assert copies[-1].num_tokens == 12


def test_a_prompt_that_vllm_has_cached_loads_nothing_and_says_so() -> None:
    scheduler = Scheduler()
    request = scheduler.add("a", 9, Errand(key=1, region_path="r", slots=(5, 6), num_loaded=8))
    assert scheduler.book.num_matched(request, 8) == 0
    scheduler.book.allocated(request, request.block_ids, 0)
    [load] = scheduler.step(a=1)[0].loads
    assert load.block_ids == load.slots == ()


def test_a_preempted_request_is_named_and_begins_again() -> None:
    """The worker takes it out when its pages were granted to another one."""
    scheduler = Scheduler()
    request = scheduler.add("a", 4, Errand(key=1))
    assert scheduler.step(a=4)[1].started == ((1, 0),)
    request.num_computed_tokens = 0
    begun = scheduler.step("a", "over before this step")[1]
    assert (begun.preempted, begun.num_free_pages, begun.started) == ((1,), 7, ())
    assert scheduler.step(a=4)[1].started == ((1, 0),)


def test_steps_are_reported_with_their_shape_and_the_ranks_hear_of_ended_requests() -> None:
    scheduler = Scheduler()
    scheduler.add("a", 8, Errand(key=1))
    scheduler.add("b", 3, Errand(key=2))
    scheduler.requests["b"].num_computed_tokens = 6
    assert scheduler.book.ended() is None
    _, begun = scheduler.step(a=8, b=1)
    assert begun.shape == StepShape(num_prefill_tokens=8, num_prefill_pairs=36, num_decodes=1, num_context_tokens=7)
    assert begun.computed == ((1, 8),)
    ended = scheduler.book.ended()
    assert ended is not None
    assert ended.seconds >= 0
    scheduler.book.closed(scheduler.requests.pop("b"))
    assert scheduler.step(a=1)[0].closed == (2,)
    assert scheduler.step(a=1)[0].closed == ()


class BlockRemoved(SimpleNamespace):
    """An event of vLLM's block pool, known by its name."""


def test_blocks_that_results_fill_are_in_the_index_where_steps_overlap() -> None:
    """vLLM caches them as results come, and drops its events then."""
    scheduler = Scheduler()
    scheduler.add("a", 4, Errand(key=1))
    scheduler.step(a=4)
    scheduler.events.append(BlockRemoved(block_hashes=[7]))
    scheduler.book.hear_cache()
    scheduler.take_events()
    scheduler.events.append(BlockRemoved(block_hashes=[8]))
    assert scheduler.step(a=1)[1].changes == (7, 8)
    assert scheduler.step(a=1)[1].changes == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from("+++---0")), max_size=60))
def test_the_index_names_the_blocks_that_vllm_has_also_when_it_has_one_twice(
    changes: list[tuple[int, int, str]],
) -> None:
    """Against a count of copies, also when all are dropped; readers that apply the changes see what a snapshot has."""
    mirror = CacheMirror(block_size=BLOCK_SIZE)
    roots = [hash_root(model_fingerprint="m", cache_salt=str(i)) for i in range(4)]
    prompts = [list(range(16 * i, 16 * i + 16)) for i in range(4)]
    names = {which: hash_blocks(prompts[which], root=roots[which], block_size=BLOCK_SIZE) for which in range(4)}
    copies = {(which, i): 0 for which in range(4) for i in range(4)}
    seen: set[BlockHash] = set()
    for which, num_blocks, kind in changes:
        theirs = tuple(bytes((10 * which + i,)) for i in range(num_blocks))
        told: tuple[Any, ...]
        if kind == "0":
            told, copies = (), dict.fromkeys(copies, 0)
        elif kind == "+":
            told = (
                BlocksStored(
                    hashes=theirs,
                    parent=None,
                    salt=salt_of(roots[which]),
                    token_ids=tuple(prompts[which][: num_blocks * BLOCK_SIZE]),
                ),
            )
            for i in range(num_blocks):
                copies[which, i] += 1
        else:
            told = theirs[::-1]
            for i in range(num_blocks):
                copies[which, i] = max(0, copies[which, i] - 1)
        events = mirror.apply(step(changes=told, is_cleared=kind == "0"))
        seen = (seen - set(events.removed)) | set(events.stored)
        right = {names[block][i] for (block, i), count in copies.items() if count}
        assert seen == right == set(mirror.snapshot().stored)
        assert mirror.num_blocks == len(right)
