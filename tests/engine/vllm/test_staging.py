"""KV that ranks put into staged blocks is what ranks of another number take out."""

import pytest
import torch

from common.ids import BlockId
from engine.kv_store import KvShape
from engine.vllm.staging import RankStaging, StagedStore, page_part

NUM_HEADS, BLOCK_SIZE, NUM_LAYERS = 6, 4, 2
SHAPE = KvShape(
    num_layers=NUM_LAYERS,
    num_kv_heads=1,
    head_dim=NUM_HEADS * 5,
    block_size=BLOCK_SIZE,
    dtype="bfloat16",
    row_bytes=NUM_HEADS * 10,
    fingerprint="any",
)


def rank_pages(store: StagedStore, num_ranks: int, whole: torch.Tensor) -> list[tuple[list[torch.Tensor], RankStaging]]:
    """Return the pages of each rank, its heads of `whole`, and its staging."""
    found = []
    for rank in range(num_ranks):
        num_own = max(1, NUM_HEADS // num_ranks)
        first = rank * NUM_HEADS // num_ranks
        layers = [layer[:, first : first + num_own].clone() for layer in whole]
        part = page_part(layers[0][0], num_rows=NUM_HEADS, rank=rank, num_ranks=num_ranks)
        found.append((layers, RankStaging(layers, part, store.region_path)))
    return found


@pytest.mark.parametrize(("num_from", "num_to"), [(1, 1), (3, 1), (1, 3), (12, 2)])
def test_blocks_of_some_ranks_are_those_of_any_number_of_ranks(num_from: int, num_to: int) -> None:
    whole = torch.randn(NUM_LAYERS, 7, NUM_HEADS, BLOCK_SIZE, 10).bfloat16()
    source, target = (StagedStore(SHAPE, num_slots, page_order="") for num_slots in (5, 9))
    for _, staging in rank_pages(source, num_from, whole):
        staging.store([6, 2, 0], [1, 4, 3])
    target.write_blocks([BlockId(8), BlockId(0)], source.read_blocks([BlockId(4), BlockId(1)]))
    for layers, staging in rank_pages(target, num_to, torch.zeros_like(whole)):
        staging.load([3, 5], [8, 0])
        staging.load([], [])  # all of it is in vLLM's cache
        first = next(i for i in range(NUM_HEADS) if torch.equal(layers[0][3, 0], whole[0, 2, i]))
        for layer, right in zip(layers, whole, strict=True):
            heads = slice(first, first + layer.shape[1])
            assert torch.equal(layer[3], right[2, heads])
            assert torch.equal(layer[5], right[6, heads])
            assert not layer[0].any()


def test_slots_are_given_out_once_until_they_come_back() -> None:
    store = StagedStore(SHAPE, 4, page_order="")
    taken = store.take(3)
    assert (len(set(taken)), store.num_free) == (3, 1)
    store.free(taken[:2])
    assert set(store.take(3)) == {*taken[:2], *range(4)} - {taken[2]}
