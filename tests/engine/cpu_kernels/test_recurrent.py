"""Recurrent layers on the compiled kernels: as in torch, and the same bits however a text is cut."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import pack_projections
from engine.ops.cpu.ops import CpuDecoder, CpuOps, can_attend
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape, windowed_layers
from engine.weights.config import DecoderConfig, parse_config
from engine.weights.decoder_weights import RecurrentWeights
from engine.weights.layout import allocate_weights, checkpoint_views
from engine.weights.quantize import QuantizationMethod, quantize_weights
from engine.weights.random_weights import fill_random
from tests.engine.cpu_kernels.pages import CPU

_RAW: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
CONFIG = parse_config(_RAW)
ALONE = parse_config(
    {**_RAW, "architectures": ["Qwen3_5ForCausalLM"], "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}
)
_MAMBA: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 64,
    "num_local_experts": 0,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    "mamba_n_heads": 4,
    "mamba_d_state": 48,
}
MAMBA = parse_config(_MAMBA)
GROUPS = parse_config(
    {
        **_MAMBA,
        "mamba_n_groups": 2,
        "mamba_d_head": 16,
        "mamba_d_conv": 2,
        "mamba_conv_bias": False,
        "time_step_limit": [0.3, 2.0],
    }
)
CONFIGS = [CONFIG, ALONE, MAMBA, GROUPS]
BLOCK_SIZE = 256
# Sequences whose texts begin, go on from a page of their own, and go on from one that they share.
LENGTHS = [(0, 70), (3, 1), (5, 130), (0, 1), (5, 2)]
SOURCES, TARGETS = (9, 1, 2, 8, 2), (0, 1, 4, 5, 7)


def make_weights(config: DecoderConfig) -> RecurrentWeights:
    torch.manual_seed(4)
    weights = allocate_weights(config, dtype=torch.float32, device=CPU).layers[0].recurrent
    assert weights is not None
    for tensor in (weights.convolution, weights.step_bias, weights.log_decay, weights.norm):
        tensor.normal_(std=0.7)
    for optional in (weights.convolution_bias, weights.skip):
        if optional is not None:
            optional.normal_(std=0.7)
    return weights


def make_store(config: DecoderConfig, dtype: torch.dtype) -> TorchKvStore:
    """Return pages of states that are random, and the same each time."""
    windowed = windowed_layers(config, 4096)
    shape = kv_shape(config, block_size=BLOCK_SIZE, dtype=dtype, fingerprint="test", windowed=windowed)
    store = TorchKvStore(shape, 16, device=CPU, num_window_pages=10)
    torch.manual_seed(3)
    store.layers[0][0].normal_()
    for block_id in range(10):
        store.window_page_of[block_id] = block_id
    return store


def recur(
    ops: CpuOps | TorchOps, spans: list[SequenceSpan], x: torch.Tensor, weights: RecurrentWeights
) -> torch.Tensor:
    return ops.plan(AttentionMetadata.from_spans(spans, block_size=BLOCK_SIZE)).recur(0, x, weights)


def make_spans(lengths: list[tuple[int, int]]) -> list[SequenceSpan]:
    """Return spans whose first blocks are full where their texts go on, so that source and target are any pages."""
    return [
        SequenceSpan(
            num_computed=BLOCK_SIZE * bool(computed),
            num_new_tokens=new,
            block_table=array("i", [source, target] if computed else [target]),
        )
        for (computed, new), source, target in zip(lengths, SOURCES, TARGETS, strict=True)
    ]


def make_inputs(config: DecoderConfig, dtype: torch.dtype) -> torch.Tensor:
    assert config.recurrent is not None
    num_features = sum(rows for _name, rows in config.recurrent.inputs)
    return torch.randn(sum(new for _computed, new in LENGTHS), num_features).to(dtype)


@pytest.mark.parametrize("config", CONFIGS)
def test_recurrence_equals_the_portable_one(kernels: CpuKernels, config: DecoderConfig) -> None:
    weights, x, spans = make_weights(config), make_inputs(config, kernels.dtype), make_spans(LENGTHS)
    stores = [make_store(config, kernels.dtype) for _ in range(2)]
    ours = recur(CpuOps(config, stores[0], kernels), spans, x, weights)
    expected = recur(TorchOps(config, stores[1]), spans, x, weights)
    tolerance = 1e-4 if kernels.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*(store.layers[0][0] for store in stores), atol=1e-4, rtol=1e-4)
    untouched = [page for page in range(10) if page not in TARGETS]
    assert torch.equal(stores[0].layers[0][0][untouched], make_store(config, kernels.dtype).layers[0][0][untouched])


@pytest.mark.parametrize("chunk_size", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_text_has_the_same_bits_alone_and_however_it_is_cut(
    kernels: CpuKernels, config: DecoderConfig, chunk_size: int
) -> None:
    weights, x, spans = make_weights(config), make_inputs(config, kernels.dtype), make_spans(LENGTHS)
    together, alone = make_store(config, kernels.dtype), make_store(config, kernels.dtype)
    expected = recur(CpuOps(config, together, kernels), spans, x, weights)
    begin, ops = 0, CpuOps(config, alone, kernels)
    for span in spans:
        end, table = begin + span.num_new_tokens, span.block_table
        for at in range(begin, end, chunk_size):
            num_new, num_done = min(chunk_size, end - at), at - begin
            part = replace(span, num_computed=span.num_computed + num_done, num_new_tokens=num_new, block_table=table)
            assert torch.equal(recur(ops, [part], x[at : at + num_new], weights), expected[at : at + num_new])
        begin = end
    assert torch.equal(alone.layers[0][0], together.layers[0][0])


def test_heads_of_sizes_that_do_not_divide_are_left_to_torch() -> None:
    assert all(map(can_attend, CONFIGS))
    assert not can_attend(parse_config({**_RAW, "linear_key_head_dim": 24}))
    assert not can_attend(parse_config({**_RAW, "linear_value_head_dim": 24}))
    assert not can_attend(parse_config({**_MAMBA, "mamba_d_state": 24}))
    assert not can_attend(parse_config({**_MAMBA, "mamba_d_head": 24}))
    assert not can_attend(parse_config({**_RAW, "partial_rotary_factor": 0.25}))


@pytest.mark.parametrize("method", [None, "int4"])
def test_tokens_of_a_model_have_the_same_bits_alone_as_in_any_crowd(
    kernels: CpuKernels, method: QuantizationMethod | None
) -> None:
    weights = allocate_weights(CONFIG, dtype=kernels.dtype, device=CPU)
    fill_random(checkpoint_views(weights, CONFIG), seed=1, std=0.15)
    if method is not None:
        quantize_weights(weights, CONFIG, method)
    pack_projections(weights, kernels)
    decoder = CpuDecoder(CONFIG, weights, kernels)
    spans = make_spans([(0, 9), (3, 1), (5, 3), (0, 1), (5, 2)])
    token_ids = torch.randint(16, (16,))

    def hidden(spans: list[SequenceSpan], token_ids: torch.Tensor, store: TorchKvStore) -> torch.Tensor:
        step = CpuOps(CONFIG, store, kernels).plan(AttentionMetadata.from_spans(spans, block_size=BLOCK_SIZE))
        return decoder.forward(token_ids, step)

    crowd = hidden(spans, token_ids, make_store(CONFIG, kernels.dtype))
    assert torch.isfinite(crowd).all()
    store, begin = make_store(CONFIG, kernels.dtype), 0
    for span in spans:
        rows = token_ids[begin : begin + span.num_new_tokens]
        assert torch.equal(hidden([span], rows, store), crowd[begin : begin + len(rows)])
        begin += len(rows)
