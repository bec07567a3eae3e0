"""The compiled operations and packed projections against the portable ones."""

import concurrent.futures
import functools
import itertools
import random
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import TorchKvStore, kv_shape
from engine.model.config import DecoderConfig, parse_config
from engine.model.precision import cpu_has
from engine.model.weights import Linear
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import Arena, PackedLinear, pack_plain
from engine.ops.cpu.ops import CpuOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def make_config(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> DecoderConfig:
    return parse_config(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 16,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "sliding_window": window,
            "max_position_embeddings": 4096,
        }
    )


def make_store(
    config: DecoderConfig, block_size: int, dtype: torch.dtype, num_blocks: int = NUM_BLOCKS
) -> TorchKvStore:
    shape = kv_shape(config, block_size=block_size, dtype=dtype, fingerprint="test")
    return TorchKvStore(shape, num_blocks, device=CPU)


def make_qkv(config: DecoderConfig, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim).to(dtype)


def spans_for(lengths: list[tuple[int, int]], block_size: int, num_blocks: int = NUM_BLOCKS) -> list[SequenceSpan]:
    """Return spans of (num_computed, num_new_tokens) on shuffled, separate pages."""
    free = list(range(num_blocks))
    random.Random(7).shuffle(free)
    spans = []
    for num_computed, num_new in lengths:
        table = array("i", [free.pop() for _ in range(-(-(num_computed + num_new) // block_size))])
        spans.append(SequenceSpan(num_computed=num_computed, num_new_tokens=num_new, block_table=table))
    return spans


lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130]), st.sampled_from([1, 1, 1, 2, 31, 64, 70])),
    min_size=1,
    max_size=4,
)


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


@pytest.mark.parametrize("size", [1, 15, 16, 17, 576])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
def test_elementwise_equals_torch(kernels: CpuKernels, size: int, num_tokens: int) -> None:
    config = make_config(1, 1, 32, None)
    store = make_store(config, 16, kernels.dtype)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)
    ours, reference = CpuOps(config, store, kernels).plan(metadata), TorchOps(config, store).plan(metadata)
    tolerance = 1e-5 if kernels.dtype is torch.float32 else 2e-2
    assert_close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    x, residual = (torch.randn(num_tokens, size).to(kernels.dtype) for _ in range(2))
    weight = torch.rand(size).to(kernels.dtype)
    assert_close(ours.rms_norm(x, weight), reference.rms_norm(x, weight))
    streams = residual.clone(), residual.clone()
    assert_close(ours.add_rms_norm(x.clone(), streams[0], weight), reference.add_rms_norm(x, streams[1], weight))
    assert torch.equal(*streams)
    gate_up = torch.randn(num_tokens, 2 * size).mul(20).to(kernels.dtype)
    assert_close(ours.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_extreme_gates_equals_torch(kernels: CpuKernels) -> None:
    config = make_config(1, 1, 32, None)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)
    step = CpuOps(config, make_store(config, 16, kernels.dtype), kernels).plan(metadata)
    gate = torch.tensor([-3e38, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30, 3e38, float("nan")], dtype=kernels.dtype)
    found = step.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(found, torch.nn.functional.silu(gate.double()).to(kernels.dtype), equal_nan=True)


def test_plan_on_a_new_thread_uses_as_many_threads_as_torch(float32_kernels: CpuKernels) -> None:
    """Otherwise a worker with one core would compute on all of them."""
    config = make_config(1, 1, 32, None)
    ops = CpuOps(config, make_store(config, 16, torch.float32), float32_kernels)
    metadata = AttentionMetadata.from_spans(spans_for([(0, 1)], 16), block_size=16)

    def plan() -> int:
        float32_kernels.use_threads(7)  # as OpenMP would decide alone
        ops.plan(metadata)
        return float32_kernels.num_threads()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(plan).result() == torch.get_num_threads()


def make_linear(out_features: int, in_features: int, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    return Linear(
        weight=torch.randn(out_features, in_features, generator=generator).to(dtype),
        bias=torch.randn(out_features, generator=generator).to(dtype),
    )


def pack(linear: Linear, kernels: CpuKernels) -> PackedLinear:
    return pack_plain(linear, kernels, Arena(4 << 20))


@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 31, 32, 33, 48, 64, 100])
@pytest.mark.parametrize("in_features", [2, 30, 64, 66])
def test_product_equals_torch(kernels: CpuKernels, out_features: int, in_features: int) -> None:
    linear = make_linear(out_features, in_features, kernels.dtype)
    packed = pack(linear, kernels)
    for num_tokens in (1, 2, 3, 11, 12, 13, 25):
        x = torch.randn(num_tokens, in_features).to(kernels.dtype)
        assert linear.bias is not None
        expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        atol, rtol = (1e-4, 1e-5) if kernels.dtype is torch.float32 else (0.1, 1e-2)
        torch.testing.assert_close(packed(x).double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("in_features", [74, 96, 1218])  # the last: a register's runs in more than one block
def test_product_when_other_rows_change_keeps_its_bits(kernels: CpuKernels, in_features: int) -> None:
    packed = pack(make_linear(70, in_features, kernels.dtype), kernels)
    x = torch.randn(70, in_features).to(kernels.dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    assert packed(x[:0]).shape == (0, 70)
    for num_tokens in (*range(2, 41), 70):
        assert torch.equal(packed(x[:num_tokens]), alone[:num_tokens])


@pytest.mark.parametrize("out_features", [576, 610])  # groups of panels, the last one incomplete
def test_wide_product_of_many_rows_equals_torch(kernels: CpuKernels, out_features: int) -> None:
    linear = make_linear(out_features, 1218, kernels.dtype)
    x = torch.randn(100, 1218).to(kernels.dtype)
    assert linear.bias is not None
    expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(pack(linear, kernels).wide(x).double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(not cpu_has("amx_bf16"), reason="needs a processor with tile registers for bfloat16")
def test_product_in_tiles_leaves_the_registers_to_torch(library: Path) -> None:
    kernels = CpuKernels(library, torch.bfloat16)
    packed, x = pack(make_linear(70, 608, torch.bfloat16), kernels), torch.randn(40, 608).bfloat16()
    weight = torch.randn(64, 608).bfloat16()
    expected = torch.nn.functional.linear(x, weight)
    for num_tokens in (1, 5, 40):
        packed(x[:num_tokens])
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)


@pytest.mark.parametrize("in_features", [64, 74])
def test_product_when_a_row_is_not_finite_leaves_the_others(kernels: CpuKernels, in_features: int) -> None:
    packed = pack(make_linear(40, in_features, kernels.dtype), kernels)
    x = torch.randn(3, in_features).to(kernels.dtype)
    expected = packed(x)
    x[1, 5] = float("nan")
    found = packed(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_arena_when_asked_for_pieces_gives_aligned_ones_that_do_not_overlap() -> None:
    arena = Arena(3 * 64 + 128)
    pieces = [arena.allocate(count, torch.bfloat16) for count in (1, 32, 31, 64)]
    for i, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(i)
    assert [set(piece.tolist()) for piece in pieces] == [{0.0}, {1.0}, {2.0}, {3.0}]
