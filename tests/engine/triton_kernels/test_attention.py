"""The two attention kernels, over one step of decodes, chunks or both, against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.ops.triton_kernels.cudnn_attention import cudnn_attention
from engine.ops.triton_kernels.decode_attention import decode_attention, split_keys
from engine.ops.triton_kernels.key_splits import KeySplits
from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.prefill_attention import prefill_attention, tile_tokens
from engine.ops.triton_kernels.step import make_prefill_tiles
from tests.engine.triton_kernels import reference
from tests.engine.triton_kernels.support import Case, assert_close, padded

_MIXED = [(80, 1), (40, 21), (5, 1), (0, 9)]


_ONE_KEY_HEAD: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}


def _splits(case: Case, pages: LayerPages, num_splits: int, *, min_keys: int = 1) -> KeySplits:
    """Return splits whose memory holds NaN, so that reads of unwritten memory show."""
    sizes = (64, case.num_heads, num_splits)
    return KeySplits(
        num_splits=num_splits,
        min_keys=min_keys,
        outputs=torch.full((*sizes, case.head_dim), float("nan"), device=pages.keys.device),
        log_sums=torch.full(sizes, float("nan"), device=pages.keys.device),
    )


def _check(case: Case, device: torch.device, *, num_splits: int = 3, min_keys: int = 1) -> None:
    """Compare each kernel alone with the reference, in the rows of its own tokens and in those of the others."""
    pages, query, sinks = case.pages(device), case.query(device), case.sinks(device)
    step = case.step(device, tile_tokens=tile_tokens(case.dtype, case.head_dim, case.num_heads // case.num_kv_heads))
    output, expected = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    decode_attention(output, query, pages, step, _splits(case, pages, num_splits, min_keys=min_keys), sinks)
    reference.decode_attention(expected, query, pages, step, sinks)
    assert_close(output, expected)
    output, expected = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    prefill_attention(output, query, pages, step, sinks)
    reference.prefill_attention(expected, query, pages, step, sinks)
    assert_close(output, expected)


# In one batch: sequences share no programs, and to start a kernel in the interpreter takes longer than most of them.
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_decode_attention_around_page_and_tile_boundaries_equals_reference(
    num_splits: int, device: torch.device
) -> None:
    context_lens = (1, 3, 4, 5, 31, 32, 33, 64, 65, 129)
    spans = [(context_len - 1, 1) for context_len in context_lens]
    _check(Case(spans=spans, **_ONE_KEY_HEAD), device, num_splits=num_splits)


@pytest.mark.parametrize("num_computed", [0, 1, 31, 33])
def test_prefill_attention_around_page_and_tile_boundaries_equals_reference(
    num_computed: int, device: torch.device
) -> None:
    spans = [(num_computed, num_new) for num_new in (2, 3, 4, 15, 16, 17, 33)]
    _check(Case(spans=spans, **_ONE_KEY_HEAD), device)


def _check_cudnn(case: Case, device: torch.device) -> None:
    """Compare the attention of chunks by cuDNN, or on a CPU by its twin, with the reference."""
    pages, query, sinks = case.pages(device), case.query(device), case.sinks(device)
    step = case.step(device, tile_tokens=tile_tokens(case.dtype, case.head_dim, case.num_heads // case.num_kv_heads))
    output, expected = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    cudnn_attention(output, query, pages, step, sinks)
    reference.prefill_attention(expected, query, pages, step, sinks)
    assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (12, False), (None, True)])
def test_attention_of_chunks_through_torch_equals_reference(
    dtype: torch.dtype, window: int | None, has_sinks: bool, device: torch.device
) -> None:
    spans = [(80, 1), (40, 21), (0, 1), (0, 9), (3, 2)]
    _check_cudnn(Case(spans=spans, num_heads=6, window=window, has_sinks=has_sinks, dtype=dtype), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_tokens", [4, 7, 40])
def test_attention_over_a_prefix_in_pieces_equals_reference(
    dtype: torch.dtype, piece_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.triton_kernels.cudnn_attention._PIECE_TOKENS", piece_tokens)
    monkeypatch.setattr("engine.ops.triton_kernels.cudnn_attention.prefill_attention", None)
    _check_cudnn(Case(spans=[(40, 21), (80, 1), (0, 9), (8, 2), (9, 5), (41, 3)], num_heads=6, dtype=dtype), device)


def test_attention_behind_a_single_token_which_cudnn_refuses_equals_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.triton_kernels.cudnn_attention._attend", None)
    _check_cudnn(Case(spans=[(1, 21), (40, 9)]), device)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations, and the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), [each for each in tree_leaves(result) if isinstance(each, Tensor)]))
        return result


def test_attention_takes_no_more_memory_behind_a_long_prefix_than_a_short_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.triton_kernels.cudnn_attention._PIECE_TOKENS", 64)
    largest = []
    for num_before in (64, 1024):
        case = Case(spans=[(num_before, 20)], num_heads=6)
        pages, query, step = case.pages(device), case.query(device), case.step(device)
        with _Operations() as operations:
            cudnn_attention(torch.empty_like(query), query, pages, step)
        given = {each.untyped_storage().data_ptr() for each in (pages.keys, pages.values, query, step.block_tables)}
        made = [each.untyped_storage() for _name, tensors in operations.calls for each in tensors]
        largest.append(max(each.nbytes() for each in made if each.data_ptr() not in given))
    assert largest[0] == largest[1] == 4 * 64 * case.num_kv_heads * case.head_dim


def test_attention_on_a_gpu_calls_cudnn_once_a_piece_with_stored_heads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card that only describes its tensors."""
    monkeypatch.setattr("engine.ops.triton_kernels.cudnn_attention._PIECE_TOKENS", 32)
    monkeypatch.setattr("torch.backends.cuda.can_use_cudnn_attention", lambda _params: True)
    step = Case(spans=[(100, 20)]).step(torch.device("cpu"))
    monkeypatch.setattr(Tensor, "copy_", lambda output, _attended: output)  # what a torch without CUDA refuses
    with FakeTensorMode(), _Operations() as operations:
        query = torch.empty(20, 6, 16, device="cuda", dtype=torch.bfloat16)
        stored = torch.empty(64, 4, 2, 16, device="cuda", dtype=torch.bfloat16)
        step = replace(step, block_tables=torch.zeros(1, 64, device="cuda", dtype=torch.int32))
        cudnn_attention(torch.empty_like(query), query, LayerPages(keys=stored, values=stored), step)
    names = [name for name, _tensors in operations.calls]
    assert names.count("aten::_scaled_dot_product_cudnn_attention") == 1 + 4
    sizes = [tensors[0].shape for name, tensors in operations.calls if name == "aten::index_select"]
    assert sizes == [(5, 4, 2, 16)] * 2 + [(8, 4, 2, 16)] * 6 + [(1, 4, 2, 16)] * 2


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 1), (17, 1)])
def test_attention_of_head_groups_equals_reference(num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    _check(Case(spans=_MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads), device)


# Each size of heads with two of pages, and each of pages with two of heads: a kernel computes with one, then the other.
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(10, 1), (10, 16), (24, 3), (24, 32), (64, 16), (64, 1), (128, 32), (128, 3)]
)
def test_attention_of_head_and_page_sizes_equals_reference(
    head_dim: int, block_size: int, device: torch.device
) -> None:
    _check(Case(spans=_MIXED, head_dim=head_dim, block_size=block_size, **_ONE_KEY_HEAD), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_half_precision_pages_equals_reference(
    dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    spans = [(150, 1), (70, 40), (15, 1), (0, 50)]
    _check(Case(spans=spans, dtype=dtype, head_dim=head_dim, block_size=16, **_ONE_KEY_HEAD), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_scaled_float8_pages_equals_reference(dtype: torch.dtype, device: torch.device) -> None:
    sizes: dict[str, Any] = {"head_dim": 64, "block_size": 16, "key_scale": 0.5, "value_scale": 3.0, **_ONE_KEY_HEAD}
    spans = [(150, 1), (100, 40), (15, 1), (0, 33)]
    _check(Case(spans=spans, dtype=dtype, page_dtype=torch.float8_e4m3fn, **sizes), device)


@pytest.mark.parametrize(("window", "num_splits"), [(1, 1), (2, 4), (33, 1), (33, 4), (64, 4), (500, 4)])
def test_decode_attention_in_window_equals_reference(window: int, num_splits: int, device: torch.device) -> None:
    _check(Case(spans=[(130, 1), (0, 1)], window=window, **_ONE_KEY_HEAD), device, num_splits=num_splits)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 500])
def test_prefill_attention_in_window_equals_reference(window: int, device: torch.device) -> None:
    _check(Case(spans=[(50, 35), (0, 40), (33, 2)], window=window, **_ONE_KEY_HEAD), device)


@settings(max_examples=8, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 140), st.just(1) | st.integers(1, 40)), min_size=1, max_size=3),
    num_splits=st.integers(1, 6),
    min_keys=st.integers(1, 80),
    window=st.none() | st.integers(1, 150),
    has_sinks=st.booleans(),
)
def test_attention_of_any_batch_and_split_equals_reference(
    device: torch.device,
    spans: list[tuple[int, int]],
    num_splits: int,
    min_keys: int,
    window: int | None,
    has_sinks: bool,
) -> None:
    _check(Case(spans=spans, window=window, has_sinks=has_sinks), device, num_splits=num_splits, min_keys=min_keys)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_of_head_groups_with_sinks_equals_reference(num_splits: int, device: torch.device) -> None:
    _check(Case(spans=_MIXED, num_heads=9, num_kv_heads=3, has_sinks=True), device, num_splits=num_splits)


def test_decode_attention_of_padding_rows_is_zero(device: torch.device) -> None:
    case = Case(spans=[(40, 1), (7, 1)], has_sinks=True)
    pages, step, sinks = case.pages(device), padded(case.step(device), 5), case.sinks(device)
    query = torch.randn(5, case.num_heads, case.head_dim, device=device)
    output, expected = torch.full_like(query, float("nan")), torch.empty_like(query)
    decode_attention(output, query, pages, step, _splits(case, pages, 3), sinks)
    reference.decode_attention(expected, query, pages, step, sinks)
    assert_close(output, expected)
    assert not output[2:].any()


def test_decode_attention_with_refilled_step_follows_its_tensors(device: torch.device) -> None:
    case = Case(spans=[(100, 1), (60, 1)])
    pages, query, step = case.pages(device), case.query(device), case.step(device)
    splits = _splits(case, pages, 3)
    for context_lens in ((101, 61), (2, 33)):
        step.context_lens.copy_(torch.tensor(context_lens))
        output, expected = torch.empty_like(query), torch.empty_like(query)
        decode_attention(output, query, pages, step, splits)
        reference.decode_attention(expected, query, pages, step)
        assert_close(output, expected)


@pytest.mark.parametrize(
    ("num_decodes", "num_splits", "min_keys"), [(1, 64, 64), (8, 9, 64), (32, 4, 512), (128, 4, 512)]
)
def test_split_keys_of_batch_fills_an_h200(num_decodes: int, num_splits: int, min_keys: int) -> None:
    case = Case(spans=[(0, 1)], num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    splits = split_keys(num_decodes, 32, case.pages(torch.device("cpu")), num_sms=132)
    assert (splits.num_splits, splits.min_keys) == (num_splits, min_keys)
    assert splits.outputs.shape == (num_decodes, 32, num_splits, 128)
    assert splits.log_sums.shape == (num_decodes, 32, num_splits)


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
