"""Compiled attention over pages of int8 and int4 codes: the same codes as torch's, the same result, the same bits."""

from array import array
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.ids import BlockId
from engine.kv_cache import TorchKvStore, kv_shape
from engine.kv_format import KvDtype
from engine.model.config import DecoderConfig
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.ops import CpuOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.ops.torch_pages import CodeLayout, layer_pages, place
from tests.engine.cpu_kernels.pages import CPU, NUM_BLOCKS, lengths, make_config, make_qkv, spans_for

FORMATS: tuple[KvDtype, ...] = ("int8", "int4")


def make_store(
    config: DecoderConfig, kv_dtype: KvDtype, dtype: torch.dtype, *, block_size: int = 16, num_blocks: int = NUM_BLOCKS
) -> TorchKvStore:
    """Return pages that hold random keys and values in all slots."""
    shape = kv_shape(config, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, fingerprint="test")
    store = TorchKvStore(shape, num_blocks, device=CPU)
    torch.manual_seed(3)
    slots = torch.arange(num_blocks * block_size)
    for pages in layer_pages(store, 0, dtype):
        pages.write(slots, torch.randn(len(slots), shape.num_kv_heads, shape.head_dim))
    return store


def stored(store: TorchKvStore, span: SequenceSpan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of a sequence's keys and values, [context_len, ...], then their scales."""
    layout, (keys, values) = CodeLayout(store.shape, store.kv_format), store.layers[0]
    at = place(torch.tensor(slots_of(span)), 16)
    views = layout.keys(keys), layout.values(values), layout.scales(keys), layout.scales(values)
    codes, more_codes, scales, more_scales = (view[at].flatten(2) for view in views)
    return codes, more_codes, scales, more_scales


def slots_of(span: SequenceSpan, begin: int = 0, end: int | None = None) -> list[int]:
    return [span.block_table[at // 16] * 16 + at % 16 for at in range(begin, span.context_len if end is None else end)]


def attend(ops: TorchOps | CpuOps, spans: list[SequenceSpan], qkv: Tensor, *, block_size: int = 16) -> Tensor:
    metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
    return ops.plan(metadata).attend(0, qkv.clone(), None, None)


@settings(max_examples=16, deadline=None)
@given(
    kv_dtype=st.sampled_from(FORMATS),
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (9, 3)]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    window=st.sampled_from([None, 7, 100]),
)
def test_attention_over_codes_equals_torch(
    float32_kernels: CpuKernels,
    kv_dtype: KvDtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    config = make_config(*heads, head_dim, window)
    spans = spans_for(lengths, 16)
    qkv = make_qkv(config, sum(new for _, new in lengths), torch.float32)
    stores = [make_store(config, kv_dtype, torch.float32) for _ in range(2)]
    ours = attend(CpuOps(config, stores[0], float32_kernels), spans, qkv)
    theirs = attend(TorchOps(config, stores[1], torch.float32), spans, qkv)
    # A value in the middle between two codes falls to either side: one code in some thousands, by a step of the grid.
    # In a small output that one code may be all the difference.
    largest, mean = (0.02, 1e-4) if kv_dtype == "int8" else (0.3, 4e-4)
    torch.testing.assert_close(ours, theirs, atol=largest, rtol=0)
    assert float((ours - theirs).abs().mean()) < mean + largest / ours.numel()
    for span in spans:
        for found, expected in zip(*(stored(store, span) for store in stores), strict=True):
            if found.dtype is torch.uint8:
                assert float((found != expected).float().mean()) < 2e-3
            else:
                torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_attention_over_codes_keeps_close_to_plain_pages(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(6, 2, 64, None)
    [span] = spans_for([(0, 200)], 16)
    qkv = make_qkv(config, 200, kernels.dtype)
    plain = kv_shape(config, block_size=16, dtype=kernels.dtype, fingerprint="test")
    expected = attend(CpuOps(config, TorchKvStore(plain, NUM_BLOCKS, device=CPU), kernels), [span], qkv).float()
    found = attend(CpuOps(config, make_store(config, kv_dtype, kernels.dtype), kernels), [span], qkv).float()
    assert float((found - expected).norm() / expected.norm()) < (0.02 if kv_dtype == "int8" else 0.2)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_attention_over_codes_keeps_its_bits_in_any_batch(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    """A user's answer for a seed must not depend on other requests."""
    config = make_config(6, 2, 64, None)
    spans = spans_for([(300, 1), (5, 1), (0, 40), (33, 7), (64, 1)], 16)
    counts = [span.num_new_tokens for span in spans]
    qkv = make_qkv(config, sum(counts), kernels.dtype)
    ops = CpuOps(config, make_store(config, kv_dtype, kernels.dtype), kernels)
    together = attend(ops, spans, qkv)
    rows = zip(spans, qkv.split(counts), together.split(counts), strict=True)  # type: ignore[no-untyped-call]
    for span, own_qkv, expected in rows:
        assert torch.equal(attend(ops, [span], own_qkv), expected)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_prompt_in_chunks_or_from_a_cache_fills_the_same_bytes(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    """Tokens read each other as they are stored, so that a block is the same in whichever step it was computed."""
    config = make_config(6, 2, 64, None)
    qkv = make_qkv(config, 100, kernels.dtype)
    table = array("i", [5, 0, 9, 2, 7, 1, 3])
    results = []
    for bounds in ([0, 100], [0, 37, 64, 100], [0, 96, 100]):
        store = make_store(config, kv_dtype, kernels.dtype)
        ops, parts = CpuOps(config, store, kernels), []
        for begin, end in pairwise(bounds):
            span = SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=table)
            parts.append(attend(ops, [span], qkv[begin:end]))
        results.append((torch.cat(parts), bytes(store.read_blocks([BlockId(i) for i in table]))))
    for attended, data in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert data == results[0][1]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_codes_in_free_slots_are_never_read(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(3, 1, 64, None)
    spans = spans_for([(20, 1), (0, 21), (70, 3)], 16)
    results = []
    for rest in (0.0, float("nan")):
        store = make_store(config, kv_dtype, kernels.dtype)
        used = [slot for span in spans for slot in slots_of(span, end=span.num_computed)]
        free = torch.tensor(sorted(set(range(NUM_BLOCKS * 16)) - set(used)))
        layout = CodeLayout(store.shape, store.kv_format)
        for pages in store.layers[0]:
            layout.scales(pages)[place(free, 16)] = rest
        torch.manual_seed(1)
        results.append(attend(CpuOps(config, store, kernels), spans, make_qkv(config, 25, kernels.dtype)))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_shows_in_its_own_sequence_only(
    kernels: CpuKernels, kv_dtype: KvDtype, bad: float
) -> None:
    config = make_config(3, 1, 64, None)
    spans = spans_for([(20, 1), (40, 1)], 16)
    qkv = make_qkv(config, 2, kernels.dtype)
    qkv[0, -1] = bad
    attended = attend(CpuOps(config, make_store(config, kv_dtype, kernels.dtype), kernels), spans, qkv)
    assert not attended[0].isfinite().all()
    assert attended[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_zeros_and_huge_values_are_stored_like_torch_stores_them(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(1, 1, 32, None)
    [span] = spans_for([(0, 4)], 16)
    qkv = make_qkv(config, 4, kernels.dtype)
    qkv[0, 32:] = 0
    qkv[1, 32:] *= 1e30
    qkv[2, 32:] *= 1e-30
    stores = [make_store(config, kv_dtype, kernels.dtype) for _ in range(2)]
    attend(CpuOps(config, stores[0], kernels), [span], qkv)
    attend(TorchOps(config, stores[1], kernels.dtype), [span], qkv)
    rows = []
    for store in stores:
        _, codes, _, scales = stored(store, span)
        rows.append(store.kv_format.mix(store.kv_format.decode(codes, scales, torch.float32))[:, 0])
    values = qkv[:, 64:].double()
    error = (rows[0].double() - values).norm(dim=1) / values.norm(dim=1).clamp_min(1e-300)
    assert float(error.max()) < (0.01 if kv_dtype == "int8" else 0.12)
    torch.testing.assert_close(rows[0][3], rows[1][3], rtol=1e-5, atol=1e-6)
    assert not rows[0][0].any()
