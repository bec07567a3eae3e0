"""Compiled attention against the portable one, over plain pages and over int8 and int4 codes.

The results are those of torch, and the bits are the same in any batch and chunk.
"""

import itertools
import random
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.ids import BlockId
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.ops import CpuOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.ops.torch_pages import CodeLayout, layer_pages, place
from engine.pages.kv_cache import TorchKvStore
from engine.pages.kv_format import KvDtype
from engine.window import Window
from tests.engine.cpu_kernels.pages import NUM_BLOCKS, lengths, make_config, make_qkv, make_store, spans_for, windows_of

CODES: tuple[KvDtype, ...] = ("int8", "int4")
FORMATS: tuple[KvDtype, ...] = ("auto", *CODES)


def attend(
    ops: TorchOps | CpuOps, spans: list[SequenceSpan], qkv: Tensor, sinks: Tensor | None = None, block_size: int = 16
) -> Tensor:
    metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
    return ops.plan(metadata).attend(0, qkv.clone(), None, None, sinks)


@settings(max_examples=25, deadline=None)
@given(
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (5, 1), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    block_size=st.sampled_from([8, 16, 32]),
    window=windows_of(1, 7, 64, 100),
    has_norms=st.booleans(),
    has_sinks=st.booleans(),
)
def test_attention_when_float32_equals_torch(
    float32_kernels: CpuKernels,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: Window | None,
    has_norms: bool,
    has_sinks: bool,
) -> None:
    config = make_config(*heads, head_dim, window)
    num_blocks = 16 * NUM_BLOCKS // block_size
    spans = spans_for(lengths, block_size, num_blocks)
    metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
    qkv = make_qkv(config, len(metadata.positions), torch.float32)
    q_norm, k_norm = (torch.rand(head_dim) if has_norms else None for _ in range(2))
    sinks = 2 * torch.randn(heads[0]) if has_sinks else None
    results, stores = [], []
    for make_ops in (lambda store: TorchOps(config, store), lambda store: CpuOps(config, store, float32_kernels)):
        store = make_store(config, torch.float32, block_size=block_size, num_blocks=num_blocks)
        results.append(make_ops(store).plan(metadata).attend(0, qkv.clone(), q_norm, k_norm, sinks))
        stores.append(store)
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=2e-5)
    for span in spans:  # the same slots are written as by torch, and no others of these pages
        for ours, theirs in zip(*(rows_of(store, span) for store in stores), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def rows_of(store: TorchKvStore, span: SequenceSpan) -> list[Tensor]:
    table = torch.tensor(span.block_table)
    return [pages.gather(table, 1, span.context_len) for pages in layer_pages(store, 0, store.kv_format.dtype)]


def slots_of(span: SequenceSpan, begin: int = 0, end: int | None = None) -> list[int]:
    return [span.block_table[at // 16] * 16 + at % 16 for at in range(begin, span.context_len if end is None else end)]


def stored(store: TorchKvStore, span: SequenceSpan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of a sequence's keys and values, [context_len, ...], then their scales."""
    layout, (keys, values) = CodeLayout(store.shape, store.kv_format), store.layers[0]
    at = place(torch.tensor(slots_of(span)), 16)
    views = layout.keys(keys), layout.values(values), layout.scales(keys), layout.scales(values)
    codes, more_codes, scales, more_scales = (view[at].flatten(2) for view in views)
    return codes, more_codes, scales, more_scales


@settings(max_examples=16, deadline=None)
@given(
    kv_dtype=st.sampled_from(CODES),
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (9, 3)]),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    window=windows_of(7, 100),
    has_sinks=st.booleans(),
)
def test_attention_over_codes_equals_torch(
    float32_kernels: CpuKernels,
    kv_dtype: KvDtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    window: Window | None,
    has_sinks: bool,
) -> None:
    config = make_config(*heads, head_dim, window)
    spans = spans_for(lengths, 16)
    sinks = 2 * torch.randn(heads[0]) if has_sinks else None
    qkv = make_qkv(config, sum(new for _, new in lengths), torch.float32)
    stores = [make_store(config, torch.float32, kv_dtype=kv_dtype) for _ in range(2)]
    ours = attend(CpuOps(config, stores[0], float32_kernels), spans, qkv, sinks)
    theirs = attend(TorchOps(config, stores[1], torch.float32), spans, qkv, sinks)
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


def test_attention_when_long_contexts_are_split_equals_torch(float32_kernels: CpuKernels) -> None:
    config = make_config(6, 2, 64, None)
    spans = spans_for([(2000, 1), (255, 1), (256, 1), (511, 1)], 16, num_blocks=200)
    store, qkv = make_store(config, torch.float32, num_blocks=200), make_qkv(config, 4, torch.float32)
    expected = attend(TorchOps(config, store), spans, qkv)
    found = attend(CpuOps(config, store, float32_kernels), spans, qkv)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_new", [1, 5])
def test_attention_when_scores_are_huge_stays_exact(float32_kernels: CpuKernels, num_new: int) -> None:
    config = make_config(2, 1, 32, None)
    spans, store = spans_for([(100, num_new)], 16), make_store(config, torch.float32)
    store.layers[0][0].mul_(300)
    qkv = make_qkv(config, num_new, torch.float32) * 300
    for sinks in (None, torch.tensor([-1e6, 1e6])):
        expected = attend(TorchOps(config, store), spans, qkv, sinks)
        found = attend(CpuOps(config, store, float32_kernels), spans, qkv, sinks)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert found[:, :32].any()
    assert not found[:, 32:].any()


@pytest.mark.parametrize("window", [None, Window(num_tokens=20), Window(num_tokens=40, is_chunk=True)], ids=str)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_free_slots_are_never_read(kernels: CpuKernels, kv_dtype: KvDtype, window: Window | None) -> None:
    config = make_config(3, 1, 64, window)
    spans = spans_for([(20, 1), (0, 21), (70, 3), (41, 1)], 16)
    # Blocks before the window have been given to others.
    oldest = [0 if window is None else max(0, window.first_visible(span.num_computed)) // 16 * 16 for span in spans]
    used = [slot for span, at in zip(spans, oldest, strict=True) for slot in slots_of(span, at, span.num_computed)]
    free = torch.tensor(sorted(set(range(NUM_BLOCKS * 16)) - set(used)))
    results = []
    for rest in (0.0, float("nan")):
        store = make_store(config, kernels.dtype, kv_dtype=kv_dtype)
        for pages, rows in zip(store.layers[0], layer_pages(store, 0, kernels.dtype), strict=True):
            if kv_dtype == "auto":
                rows.write(free, torch.full((len(free), 1, 64), rest, dtype=kernels.dtype))
            else:
                CodeLayout(store.shape, store.kv_format).scales(pages)[place(free, 16)] = rest
        torch.manual_seed(1)
        results.append(attend(CpuOps(config, store, kernels), spans, make_qkv(config, 26, kernels.dtype)))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_drafted_token_is_written_to_the_pages_of_its_branches_too(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(6, 2, 64, None)
    [span] = spans_for([(37, 1)], 16)
    unused = sorted(set(range(NUM_BLOCKS)) - set(span.block_table))
    branches = [array("i", [*span.block_table[:2], block_id]) for block_id in unused[:2]]
    store = make_store(config, kernels.dtype, kv_dtype=kv_dtype)
    ops = CpuOps(config, store, kernels)
    attend(ops, [replace(span, mirrors=branches)], make_qkv(config, 1, kernels.dtype))
    for pages in layer_pages(store, 0, kernels.dtype):
        tables = [torch.tensor(table) for table in (span.block_table, *branches)]
        own, *others = (pages.gather(table, 1, 38)[0, :, 37] for table in tables)
        assert all(torch.equal(own, each) for each in others)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_attention_keeps_a_rows_bits_in_any_batch(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    """A user's answer for a seed must not depend on other requests."""
    config = make_config(6, 2, 64, None)
    spans = spans_for([(300, 1), (5, 1), (0, 40), (33, 7), (64, 1)], 16)
    counts = [span.num_new_tokens for span in spans]
    qkv = make_qkv(config, sum(counts), kernels.dtype)
    ops = CpuOps(config, make_store(config, kernels.dtype, kv_dtype=kv_dtype), kernels)
    together = attend(ops, spans, qkv)
    rows = zip(spans, qkv.split(counts), together.split(counts), strict=True)  # type: ignore[no-untyped-call]
    for span, own_qkv, expected in rows:
        assert torch.equal(attend(ops, [span], own_qkv), expected)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((6, 2), 64, 16), ((2, 2), 32, 32), ((7, 1), 96, 16), ((20, 1), 64, 16), ((6, 2), 64, 8)],
)
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [(None, False), (Window(num_tokens=100), True), (Window(num_tokens=100, is_chunk=True), False)],
)
def test_attention_of_a_token_has_the_same_bits_decoded_and_in_any_chunk(
    kernels: CpuKernels, heads: tuple[int, int], head_dim: int, block_size: int, window: Window | None, has_sinks: bool
) -> None:
    """An answer that goes on elsewhere was decoded there token by token, and is read here in one piece."""
    config = make_config(*heads, head_dim, window)
    num_tokens, num_blocks = 590, 16 * NUM_BLOCKS // block_size
    qkv = make_qkv(config, num_tokens, kernels.dtype)
    sinks = torch.randn(heads[0]).to(kernels.dtype) if has_sinks else None

    def attended(*cuts: int) -> torch.Tensor:
        table = array("i", random.Random(5).sample(range(num_blocks), -(-num_tokens // block_size)))
        store = make_store(config, kernels.dtype, block_size=block_size, num_blocks=num_blocks)
        ops, parts = CpuOps(config, store, kernels), []
        for begin, end in itertools.pairwise((0, *cuts, num_tokens)):
            span = SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=table)
            parts.append(attend(ops, [span], qkv[begin:end], sinks, block_size))
        return torch.cat(parts)

    expected = attended()
    assert torch.equal(attended(*range(1, num_tokens)), expected)
    assert torch.equal(attended(3, 64, 65, 200, 255, 256, 257, 500), expected)


@pytest.mark.parametrize("num_bad", [256, 0])  # keys of the first split; else only the new token's own
def test_attention_to_keys_that_are_no_numbers_is_none(kernels: CpuKernels, num_bad: int) -> None:
    """Else a sequence with damaged pages would get an answer that ignores a part of its prompt."""
    config = make_config(2, 1, 64, None)
    [span] = spans_for([(319, 1)], 16)
    store = make_store(config, kernels.dtype)
    bad = torch.full((num_bad, 1, 64), float("nan"), dtype=kernels.dtype)
    layer_pages(store, 0, kernels.dtype)[0].write(torch.tensor(slots_of(span, end=num_bad), dtype=torch.int64), bad)
    qkv = make_qkv(config, 1, kernels.dtype)
    qkv[:, 2 * 64 : 3 * 64] = float("nan") if num_bad == 0 else 1.0
    assert not attend(CpuOps(config, store, kernels), [span], qkv).isfinite().any()


@pytest.mark.parametrize("kv_dtype", CODES)
def test_attention_over_codes_keeps_close_to_plain_pages(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(6, 2, 64, None)
    [span] = spans_for([(0, 200)], 16)
    qkv = make_qkv(config, 200, kernels.dtype)
    expected = attend(CpuOps(config, make_store(config, kernels.dtype), kernels), [span], qkv).float()
    found = attend(CpuOps(config, make_store(config, kernels.dtype, kv_dtype=kv_dtype), kernels), [span], qkv).float()
    assert float((found - expected).norm() / expected.norm()) < (0.02 if kv_dtype == "int8" else 0.2)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_prompt_in_chunks_or_from_a_cache_fills_the_same_bytes(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    """Tokens read each other as they are stored, so that a block is the same in whichever step it was computed."""
    config = make_config(6, 2, 64, None)
    qkv = make_qkv(config, 100, kernels.dtype)
    table = array("i", [5, 0, 9, 2, 7, 1, 3])
    results = []
    for bounds in ([0, 100], [0, 37, 64, 100], [0, 96, 100]):
        store = make_store(config, kernels.dtype, kv_dtype=kv_dtype)
        ops, parts = CpuOps(config, store, kernels), []
        for begin, end in itertools.pairwise(bounds):
            span = SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=table)
            parts.append(attend(ops, [span], qkv[begin:end]))
        results.append((torch.cat(parts), bytes(store.read_blocks([BlockId(i) for i in table]))))
    for attended, data in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert data == results[0][1]


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_shows_in_its_own_sequence_only(
    kernels: CpuKernels, kv_dtype: KvDtype, bad: float
) -> None:
    config = make_config(3, 1, 64, None)
    spans = spans_for([(20, 1), (40, 1)], 16)
    qkv = make_qkv(config, 2, kernels.dtype)
    qkv[0, -1] = bad
    attended = attend(CpuOps(config, make_store(config, kernels.dtype, kv_dtype=kv_dtype), kernels), spans, qkv)
    assert not attended[0].isfinite().all()
    assert attended[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", CODES)
def test_zeros_and_huge_values_are_stored_like_torch_stores_them(kernels: CpuKernels, kv_dtype: KvDtype) -> None:
    config = make_config(1, 1, 32, None)
    [span] = spans_for([(0, 4)], 16)
    qkv = make_qkv(config, 4, kernels.dtype)
    qkv[0, 32:] = 0
    qkv[1, 32:] *= 1e30
    qkv[2, 32:] *= 1e-30
    stores = [make_store(config, kernels.dtype, kv_dtype=kv_dtype) for _ in range(2)]
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
