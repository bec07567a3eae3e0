"""Blocks mean the same on the wire whatever order a backend keeps its pages in."""

import numpy as np
import pytest

from common.errors import LayoutMismatch
from common.ids import BlockId
from engine.kv_store import KvShape
from engine.vllm.pages import HeadOrder, VllmKvStore

NUM_BLOCKS = 5
SHAPE = KvShape(
    num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="bfloat16", row_bytes=8, fingerprint="vllm"
)
_HALF = SHAPE.block_size * SHAPE.head_dim
PLAIN = HeadOrder(elements=tuple(range(2 * _HALF)))
KEYS_TRANSPOSED = HeadOrder(
    elements=(*np.arange(_HALF).reshape(SHAPE.block_size, -1).T.reshape(-1).tolist(), *range(_HALF, 2 * _HALF))
)


def store_of(order: HeadOrder) -> VllmKvStore:
    store = VllmKvStore(SHAPE, NUM_BLOCKS)
    store.learn(order)
    return store


def numbered(num_blocks: int) -> memoryview:
    return np.arange(num_blocks * SHAPE.block_bytes // 2, dtype=np.uint16).view(np.uint8).data


@pytest.mark.parametrize("order", [PLAIN, KEYS_TRANSPOSED])
def test_blocks_read_what_was_written_in_the_place_that_the_backend_reads(order: HeadOrder) -> None:
    store = store_of(order)
    store.write_blocks([BlockId(3), BlockId(1)], numbered(2))
    assert bytes(store.read_blocks([BlockId(3), BlockId(1)])) == bytes(numbered(2))
    assert not any(store.read_blocks([BlockId(0)]))
    memory = np.frombuffer(store._memory, dtype=np.uint16)[:-8]  # noqa: SLF001 - what a rank maps
    pages = memory.reshape(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, 2 * _HALF)
    wire = np.frombuffer(numbered(2), dtype=np.uint16).reshape(2, 2, 2, SHAPE.block_size, 3, SHAPE.head_dim)
    for layer, head, place in ((0, 0, 0), (1, 2, 5), (1, 1, _HALF + 7)):
        kind, element = divmod(order.elements[place], _HALF)
        token, dimension = divmod(element, SHAPE.head_dim)
        assert pages[layer, 3, head, place] == wire[0, layer, kind, token, head, dimension]


def test_a_peer_with_another_order_gets_the_same_block() -> None:
    sender, receiver = store_of(PLAIN), store_of(KEYS_TRANSPOSED)
    sender.write_blocks([BlockId(2)], numbered(1))
    receiver.write_blocks([BlockId(4)], sender.read_blocks([BlockId(2)]))
    assert bytes(receiver.read_blocks([BlockId(4)])) == bytes(numbered(1))


def test_a_mapped_peer_reads_as_the_peer_itself_and_copies_stay_whole() -> None:
    store = store_of(KEYS_TRANSPOSED)
    store.write_blocks([BlockId(1)], numbered(1))
    store.copy_block(BlockId(1), BlockId(0))
    mapped = store_of(KEYS_TRANSPOSED).map_peer(memoryview(store._memory), NUM_BLOCKS)  # noqa: SLF001 - as by its file
    assert bytes(mapped.read_blocks([0])) == bytes(numbered(1))
    with pytest.raises(LayoutMismatch):
        mapped.read_blocks([NUM_BLOCKS])


def test_an_order_that_leaves_a_place_out_is_refused() -> None:
    with pytest.raises(ValueError, match="each in one place"):
        store_of(HeadOrder(elements=(0,) * (2 * _HALF)))
