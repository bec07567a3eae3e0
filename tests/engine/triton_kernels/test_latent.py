"""The kernels of latent attention against torch, over pages whose unused rows are NaN."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.ops.triton_kernels.key_splits import KeySplits
from engine.ops.triton_kernels.latent_attention import (
    attend_latent_chunks,
    decode_latent,
    latent_tile_tokens,
    split_latent_keys,
)
from engine.ops.triton_kernels.latent_rows import LatentPages
from engine.ops.triton_kernels.latent_write import LatentRotation, latent_write
from engine.ops.triton_kernels.step import DeviceStep
from engine.weights.rope import halves, rotate
from tests.engine.triton_kernels.support import Case, assert_close, bits, padded

_SCALE = 0.3
_MIXED = [(40, 21), (80, 1), (0, 1), (0, 9), (3, 2), (33, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Latent:
    """A batch over latent rows, with its pages, step and queries."""

    spans: Seq[tuple[int, int]]
    num_heads: int = 6
    rank: int = 20
    rope_dim: int = 6
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def case(self) -> Case:
        return Case(
            spans=self.spans,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.rank + self.rope_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            seed=self.seed,
        )

    def pages(self, device: torch.device) -> LatentPages:
        return LatentPages(rows=self.case.pages(device).keys, rank=self.rank, score_scale=_SCALE)

    def step(self, device: torch.device) -> DeviceStep:
        return self.case.step(device, tile_tokens=latent_tile_tokens(self.dtype, self.num_heads))

    def splits(self, pages: LatentPages, num_splits: int, min_keys: int) -> KeySplits:
        sizes = (len(self.spans), self.num_heads, num_splits)
        device = pages.rows.device
        return KeySplits(
            num_splits=num_splits,
            min_keys=min_keys,
            outputs=torch.full((*sizes, self.rank), float("nan"), device=device),
            log_sums=torch.full(sizes, float("nan"), device=device),
        )


def _reference(query: Tensor, pages: LatentPages, step: DeviceStep) -> Tensor:
    """Return the attention of all tokens, [num_tokens, num_heads, rank]."""
    results = []
    starts = step.query_start_loc.tolist()
    for seq, (begin, end, context_len) in enumerate(zip(starts, starts[1:], step.context_lens.tolist(), strict=False)):
        if not context_len:
            results.append(query.new_zeros((end - begin, query.shape[1], pages.rank)))
            continue
        blocks = step.block_tables[seq, : -(-context_len // pages.block_size)].long()
        rows = pages.rows[blocks].float().flatten(0, 1)[:context_len, 0]
        scores = torch.einsum("qhd,kd->hqk", query[begin:end].float(), rows) * _SCALE
        hidden = torch.ones(scores.shape[1:], device=query.device).triu(context_len - (end - begin) + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,kd->qhd", weights, rows[:, : pages.rank]).to(query.dtype))
    return torch.cat(results)


def _check(latent: _Latent, device: torch.device, *, num_splits: int = 3, min_keys: int = 1) -> None:
    """Compare both kernels: each writes the rows of its own tokens, and no others."""
    pages, step, query = latent.pages(device), latent.step(device), latent.case.query(device)
    expected = _reference(query, pages, step)
    decoded, attended = (torch.full_like(expected, 7.0) for _ in range(2))
    decode_latent(decoded, query, pages, step, latent.splits(pages, num_splits, min_keys))
    attend_latent_chunks(attended, query, pages, step)
    num_new = torch.tensor([new for _, new in latent.spans], device=device)
    is_decode = num_new.repeat_interleave(num_new) == 1
    for found, is_own in ((decoded, is_decode), (attended, ~is_decode)):
        assert_close(found[is_own], expected[is_own])
        assert (found[~is_own] == 7.0).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_decodes_around_page_and_tile_boundaries_equal_torch(num_splits: int, device: torch.device) -> None:
    context_lens = (1, 3, 4, 5, 15, 16, 17, 64, 65, 129)
    _check(_Latent(spans=[(each - 1, 1) for each in context_lens]), device, num_splits=num_splits)


@pytest.mark.parametrize("num_computed", [0, 1, 15, 33])
def test_chunks_around_page_and_tile_boundaries_equal_torch(num_computed: int, device: torch.device) -> None:
    _check(_Latent(spans=[(num_computed, new) for new in (2, 3, 4, 5, 15, 17)]), device)


@pytest.mark.parametrize("num_heads", [1, 2, 16, 17, 40])
def test_attention_of_any_number_of_heads_equals_torch(num_heads: int, device: torch.device) -> None:
    _check(_Latent(spans=_MIXED, num_heads=num_heads), device)


@pytest.mark.parametrize(
    ("rank", "rope_dim", "block_size"), [(16, 4, 1), (24, 16, 3), (64, 2, 16), (100, 20, 32), (512, 64, 16)]
)
def test_attention_of_row_and_page_sizes_equals_torch(
    rank: int, rope_dim: int, block_size: int, device: torch.device
) -> None:
    _check(_Latent(spans=_MIXED, rank=rank, rope_dim=rope_dim, block_size=block_size), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision_equals_torch(dtype: torch.dtype, device: torch.device) -> None:
    _check(_Latent(spans=[(150, 1), (70, 20), (0, 33)], dtype=dtype, num_heads=20, block_size=16), device)


@settings(max_examples=8, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 140), st.just(1) | st.integers(1, 30)), min_size=1, max_size=4),
    num_splits=st.integers(1, 6),
    min_keys=st.integers(1, 80),
    seed=st.integers(0, 9),
)
def test_attention_of_any_batch_page_order_and_split_equals_torch(
    device: torch.device, spans: list[tuple[int, int]], num_splits: int, min_keys: int, seed: int
) -> None:
    _check(_Latent(spans=spans, seed=seed), device, num_splits=num_splits, min_keys=min_keys)


def test_decodes_of_padding_are_zero_and_follow_a_refilled_step(device: torch.device) -> None:
    latent = _Latent(spans=[(100, 1), (60, 1)])
    pages, step = latent.pages(device), padded(latent.step(device), 5)
    query = torch.randn(5, latent.num_heads, latent.rank + latent.rope_dim, device=device)
    splits = replace(latent, spans=[(0, 1)] * 5).splits(pages, 3, 1)
    for context_lens in ((101, 61, 0, 0, 0), (2, 33, 0, 0, 0)):
        step.context_lens.copy_(torch.tensor(context_lens))
        output = torch.full((5, latent.num_heads, latent.rank), float("nan"), device=device)
        decode_latent(output, query, pages, step, splits)
        assert_close(output, _reference(query, pages, step))
        assert not output[2:].any()


@pytest.mark.parametrize("has_interleaved_pairs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_of_rows_and_rotation_of_queries_equal_torch(
    dtype: torch.dtype, has_interleaved_pairs: bool, device: torch.device
) -> None:
    latent, nope_dim, eps = _Latent(spans=[(5, 3), (9, 1)], num_heads=17, dtype=dtype), 10, 1e-6
    pages, step = latent.pages(device), latent.step(device)
    step.slot_mapping[1] = -1
    generator = torch.Generator().manual_seed(0)
    size = latent.num_heads * (nope_dim + latent.rope_dim)
    compressed = torch.randn((4, size + latent.rank + latent.rope_dim), generator=generator).to(device, dtype)
    query, row = torch.unflatten(compressed[:, :size], 1, (latent.num_heads, -1)), compressed[:, size:]
    norm = torch.randn(latent.rank, generator=generator).to(dtype).to(device, torch.float32)
    angles = torch.randn((16, latent.rope_dim // 2), generator=generator).to(device)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    before = pages.rows.clone()

    def rotated(heads: Tensor) -> Tensor:
        at = step.positions.long()
        cos, sin = (each[at].repeat(1, 2)[:, None] for each in (angles.cos(), angles.sin()))
        sign = torch.tensor([-1.0, 1.0], device=device).repeat_interleave(latent.rope_dim // 2)
        return rotate((halves(heads) if has_interleaved_pairs else heads).float(), cos, sin * sign).to(dtype)

    by = LatentRotation(norm=norm, eps=eps, angles=table, has_interleaved_pairs=has_interleaved_pairs)
    found = latent_write(query, row, by, pages, step)
    assert_close(found, rotated(query[..., nope_dim:]))
    normed = F.rms_norm(row[:, : latent.rank].float(), (latent.rank,), eps=eps).to(dtype) * norm.to(dtype)
    expected = torch.cat((normed, rotated(row[:, None, latent.rank :])[:, 0]), -1)
    written = [0, 2, 3]
    slots = step.slot_mapping[written]
    place = slots // pages.block_size, slots % pages.block_size, 0
    assert_close(pages.rows[place], expected[written])
    pages.rows[place] = before[place]
    assert torch.equal(bits(pages.rows), bits(before))


@pytest.mark.parametrize(
    ("num_decodes", "num_heads", "num_splits", "min_keys"), [(1, 16, 64, 32), (8, 128, 33, 32), (128, 128, 4, 512)]
)
def test_split_latent_keys_of_batch_fills_an_h200(
    num_decodes: int, num_heads: int, num_splits: int, min_keys: int
) -> None:
    rows = torch.empty((4, 16, 1, 576), dtype=torch.bfloat16)
    pages = LatentPages(rows=rows, rank=512, score_scale=_SCALE)
    splits = split_latent_keys(num_decodes, num_heads, pages, num_sms=132)
    assert (splits.num_splits, splits.min_keys) == (num_splits, min_keys)
    assert splits.outputs.shape == (num_decodes, num_heads, num_splits, 512)
