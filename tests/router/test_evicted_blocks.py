"""The ghost list: what a larger cache would have found."""

from common.ids import WorkerId
from common.kv_events import KvEvents
from router.evicted_blocks import EvictedBlocks
from router.index import PrefixIndex
from tests.router.test_index import blocks

A, B = WorkerId("a"), WorkerId("b")


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
