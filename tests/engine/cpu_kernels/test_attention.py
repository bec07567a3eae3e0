"""Compiled attention against the portable one: the same result, and the same bits in any batch and chunk."""

import itertools
import random
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.ops import CpuOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from tests.engine.cpu_kernels.pages import NUM_BLOCKS, lengths, make_config, make_qkv, make_store, spans_for


@settings(max_examples=25, deadline=None)
@given(
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (5, 1), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    has_norms=st.booleans(),
)
def test_attention_when_float32_equals_torch(
    float32_kernels: CpuKernels,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    has_norms: bool,
) -> None:
    config = make_config(*heads, head_dim, window)
    spans = spans_for(lengths, block_size)
    metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
    qkv = make_qkv(config, len(metadata.positions), torch.float32)
    norms = (torch.rand(head_dim), torch.rand(head_dim)) if has_norms else (None, None)
    results, stores = [], []
    for make_ops in (lambda store: TorchOps(config, store), lambda store: CpuOps(config, store, float32_kernels)):
        store = make_store(config, block_size, torch.float32)
        torch.manual_seed(3)
        for pages in store.layers[0]:
            pages.normal_()
        results.append(make_ops(store).plan(metadata).attend(0, qkv.clone(), *norms))
        stores.append(store)
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=2e-5)
    for span in spans:  # the same slots are written as by torch, and no others of these pages
        for ours, theirs in zip(stores[1].layers[0], stores[0].layers[0], strict=True):
            written = [table_row(ours, span), table_row(theirs, span)]
            torch.testing.assert_close(*written, atol=1e-5, rtol=1e-5)


def table_row(pages: torch.Tensor, span: SequenceSpan) -> torch.Tensor:
    return pages[list(span.block_table)].flatten(0, 1)[: span.context_len]


def test_attention_when_long_contexts_are_split_equals_torch(float32_kernels: CpuKernels) -> None:
    config = make_config(6, 2, 64, None)
    spans = spans_for([(2000, 1), (255, 1), (256, 1), (511, 1)], 16, num_blocks=200)
    metadata = AttentionMetadata.from_spans(spans, block_size=16)
    store = make_store(config, 16, torch.float32, num_blocks=200)
    for pages in store.layers[0]:
        pages.normal_()
    qkv = make_qkv(config, 4, torch.float32)
    expected = TorchOps(config, store).plan(metadata).attend(0, qkv.clone(), None, None)
    found = CpuOps(config, store, float32_kernels).plan(metadata).attend(0, qkv.clone(), None, None)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_new", [1, 5])
def test_attention_when_scores_are_huge_stays_exact(float32_kernels: CpuKernels, num_new: int) -> None:
    config = make_config(2, 1, 32, None)
    [span] = spans_for([(100, num_new)], 16)
    metadata = AttentionMetadata.from_spans([span], block_size=16)
    store = make_store(config, 16, torch.float32)
    store.layers[0][0].normal_().mul_(300)
    store.layers[0][1].normal_()
    qkv = make_qkv(config, num_new, torch.float32) * 300
    expected = TorchOps(config, store).plan(metadata).attend(0, qkv.clone(), None, None)
    found = CpuOps(config, store, float32_kernels).plan(metadata).attend(0, qkv.clone(), None, None)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_attention_when_free_slots_hold_nan_does_not_read_them(kernels: CpuKernels) -> None:
    config = make_config(3, 1, 64, None)
    spans = spans_for([(20, 1), (0, 21), (70, 3)], 16)
    metadata = AttentionMetadata.from_spans(spans, block_size=16)
    store = make_store(config, 16, kernels.dtype)
    for pages in store.layers[0]:
        pages.fill_(float("nan"))
        for span in spans:
            table_rows = pages.view(-1, 1, 64)
            slots = [span.block_table[at // 16] * 16 + at % 16 for at in range(span.num_computed)]
            table_rows[slots] = torch.randn(len(slots), 1, 64).to(kernels.dtype)
    attended = CpuOps(config, store, kernels).plan(metadata).attend(0, make_qkv(config, 25, kernels.dtype), None, None)
    assert attended.isfinite().all()


def test_attention_when_the_batch_changes_keeps_a_rows_bits(kernels: CpuKernels) -> None:
    """A user's answer for a seed must not depend on other requests."""
    config = make_config(6, 2, 64, None)
    spans = spans_for([(300, 1), (5, 1), (0, 40), (33, 7), (64, 1)], 16)
    counts = [span.num_new_tokens for span in spans]
    qkv = make_qkv(config, sum(counts), kernels.dtype)
    store = make_store(config, 16, kernels.dtype)
    for pages in store.layers[0]:
        pages.normal_()
    ops = CpuOps(config, store, kernels)
    together = ops.plan(AttentionMetadata.from_spans(spans, block_size=16)).attend(0, qkv.clone(), None, None)
    rows = zip(spans, qkv.split(counts), together.split(counts), strict=True)  # type: ignore[no-untyped-call]
    for span, own_qkv, expected in rows:
        alone = ops.plan(AttentionMetadata.from_spans([span], block_size=16)).attend(0, own_qkv.clone(), None, None)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((2, 2), 32), ((7, 1), 96), ((20, 1), 64)])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_a_token_has_the_same_bits_decoded_and_in_any_chunk(
    kernels: CpuKernels, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    """An answer that goes on elsewhere was decoded there token by token, and is read here in one piece."""
    config = make_config(*heads, head_dim, window)
    num_tokens = 590
    qkv = make_qkv(config, num_tokens, kernels.dtype)

    def attended(*cuts: int) -> torch.Tensor:
        table = array("i", random.Random(5).sample(range(NUM_BLOCKS), -(-num_tokens // 16)))
        ops, parts = CpuOps(config, make_store(config, 16, kernels.dtype), kernels), []
        for begin, end in itertools.pairwise((0, *cuts, num_tokens)):
            span = SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=table)
            step = ops.plan(AttentionMetadata.from_spans([span], block_size=16))
            parts.append(step.attend(0, qkv[begin:end].clone(), None, None))
        return torch.cat(parts)

    expected = attended()
    assert torch.equal(attended(*range(1, num_tokens)), expected)
    assert torch.equal(attended(3, 64, 65, 200, 255, 256, 257, 500), expected)


@pytest.mark.parametrize("num_bad", [256, 0])  # keys of the first split; else only the new token's own
def test_attention_to_keys_that_are_no_numbers_is_none(kernels: CpuKernels, num_bad: int) -> None:
    """Else a sequence with damaged pages would get an answer that ignores a part of its prompt."""
    config = make_config(2, 1, 64, None)
    [span] = spans_for([(319, 1)], 16)
    store = make_store(config, 16, kernels.dtype)
    for pages in store.layers[0]:
        pages.normal_()
    slots = [span.block_table[at // 16] * 16 + at % 16 for at in range(num_bad)]
    store.layers[0][0].view(-1, 1, 64)[slots] = float("nan")
    qkv = make_qkv(config, 1, kernels.dtype)
    qkv[:, 2 * 64 : 3 * 64] = float("nan") if num_bad == 0 else 1.0
    step = CpuOps(config, store, kernels).plan(AttentionMetadata.from_spans([span], block_size=16))
    assert not step.attend(0, qkv, None, None).isfinite().any()
