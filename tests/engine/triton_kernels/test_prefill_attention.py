import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.triton_kernels import reference
from engine.ops.triton_kernels.prefill_attention import prefill_attention, tile_tokens
from engine.ops.triton_kernels.step import make_prefill_tiles
from tests.engine.triton_kernels.support import Case, assert_close


def _check(case: Case, device: torch.device) -> None:
    pages, query = case.pages(device), case.query(device)
    step = case.step(device, tile_tokens=tile_tokens(case.dtype, case.head_dim, case.num_heads // case.num_kv_heads))
    output, expected = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    prefill_attention(output, query, pages, step)
    reference.prefill_attention(expected, query, pages, step)
    assert_close(output, expected)


@pytest.mark.parametrize("num_new", [2, 3, 4, 5, 15, 16, 17, 32, 33, 65])
@pytest.mark.parametrize("num_computed", [0, 1, 31, 33])
def test_prefill_attention_around_page_and_tile_boundaries_equals_reference(
    num_computed: int, num_new: int, device: torch.device
) -> None:
    _check(Case(spans=[(num_computed, num_new)]), device)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2), (8, 1), (34, 2)])
def test_prefill_attention_of_head_groups_equals_reference(
    num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    _check(Case(spans=[(40, 21), (0, 9)], num_heads=num_heads, num_kv_heads=num_kv_heads), device)


@pytest.mark.parametrize("head_dim", [10, 24, 64, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_prefill_attention_of_head_and_page_sizes_equals_reference(
    head_dim: int, block_size: int, device: torch.device
) -> None:
    _check(Case(spans=[(33, 30), (0, 17)], head_dim=head_dim, block_size=block_size), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_attention_of_half_precision_pages_equals_reference(
    dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    _check(Case(spans=[(70, 40), (0, 50)], dtype=dtype, head_dim=head_dim, block_size=16), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_attention_of_scaled_float8_pages_equals_reference(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(
        spans=[(100, 40), (0, 33)],
        dtype=dtype,
        page_dtype=torch.float8_e4m3fn,
        head_dim=64,
        block_size=16,
        key_scale=0.5,
        value_scale=3.0,
    )
    _check(case, device)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_prefill_attention_in_window_equals_reference(window: int, device: torch.device) -> None:
    _check(Case(spans=[(50, 35), (0, 40), (33, 2)], window=window), device)


def test_prefill_attention_beside_decodes_writes_rows_of_chunks_alone(device: torch.device) -> None:
    _check(Case(spans=[(3, 1), (40, 5), (0, 1), (0, 33)]), device)


@settings(max_examples=12, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 70),
)
def test_prefill_attention_of_any_batch_equals_reference(
    device: torch.device, spans: list[tuple[int, int]], window: int | None
) -> None:
    _check(Case(spans=spans, window=window), device)


def test_tile_tokens_of_group_beyond_a_tile_is_refused() -> None:
    assert tile_tokens(torch.bfloat16, 128, 4) == 32
    assert tile_tokens(torch.bfloat16, 64, 3) == 42
    with pytest.raises(ValueError, match="129 query heads share a key head"):
        tile_tokens(torch.bfloat16, 128, 129)


def test_make_prefill_tiles_covers_each_chunk_once_with_longest_first() -> None:
    metadata = Case(spans=[(0, 9), (50, 1), (20, 4), (0, 2)]).metadata()
    tiles = make_prefill_tiles(metadata, tile_tokens=4)
    assert tiles.tolist() == [[2, 0], [0, 8], [0, 4], [0, 0], [3, 0]]
    assert tiles.dtype == np.int32
