"""The kernel against plain torch, in the interpreter or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.kv_copy import block_view, move_blocks_in_torch
from engine.executor import NONCE_BYTES
from tests.engine.cuda_kv.support import DEVICE, make_shape, make_storage

pytest.importorskip("triton")

from engine.cuda.kernels import move_blocks


@settings(max_examples=20, deadline=None)
@given(
    num_parts=st.integers(1, 4),
    num_words=st.sampled_from([1, 7, 1023, 1024, 1025]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    ids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6, unique_by=lambda pair: pair[1]),
    layouts=st.tuples(st.booleans(), st.booleans()),
)
def test_move_blocks_equals_torch_in_every_layout(
    num_parts: int,
    num_words: int,
    dtype: torch.dtype,
    ids: list[tuple[int, int]],
    layouts: tuple[bool, bool],
) -> None:
    def blocks(num_blocks: int, by_part: bool) -> torch.Tensor:
        sizes = (num_parts, num_blocks, num_words) if by_part else (num_blocks, num_parts, num_words)
        values = torch.arange(num_blocks * num_parts * num_words).to(dtype).view(sizes).to(DEVICE)
        return values.transpose(0, 1) if by_part else values

    source, target = blocks(4, layouts[0]) + 1, blocks(6, layouts[1])
    source_ids = torch.tensor([pair[0] for pair in ids], dtype=torch.int64, device=DEVICE)
    target_ids = torch.tensor([pair[1] for pair in ids], dtype=torch.int64, device=DEVICE)
    expected = target.clone()
    move_blocks_in_torch(source, source_ids, expected, target_ids)
    move_blocks(source, source_ids, target, target_ids)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [(16, 128, "bfloat16"), (4, 10, "float32"), (3, 10, "float16"), (1, 5, "float8_e4m3fn")],
)
def test_move_blocks_between_pages_of_any_word_equals_torch(block_size: int, head_dim: int, dtype: str) -> None:
    shape = make_shape(dtype=dtype, head_dim=head_dim, num_kv_heads=3, block_size=block_size)
    source, target, expected = (make_storage(shape, 7, seed=seed)[:-NONCE_BYTES] for seed in (0, 1, 1))
    source_ids, target_ids = torch.tensor([5, 0, 6], device=DEVICE), torch.tensor([1, 6, 2], device=DEVICE)
    move_blocks(block_view(source, shape), source_ids, block_view(target, shape), target_ids)
    move_blocks_in_torch(block_view(source, shape), source_ids, block_view(expected, shape), target_ids)
    assert torch.equal(target, expected)
