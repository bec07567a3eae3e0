"""Mixtures of experts on the compiled kernels: a token is the same in every crowd and on every way."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.random_models import CONFIGS
from engine.model.floors import model_shape
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import DepthParts, pack_projections
from engine.ops.cpu.ops import CpuDecoder, CpuOps
from engine.ops.metadata import AttentionMetadata
from engine.weights.config import DecoderConfig, parse_config
from engine.weights.decoder_weights import DecoderWeights, Linear, Moe
from engine.weights.grouped import GroupedLinear
from engine.weights.layout import allocate_weights, checkpoint_views
from engine.weights.quantize import QuantizationMethod, quantize_weights, quantizer
from engine.weights.random_weights import fill_random
from engine.weights.segments import num_segments
from tests.engine.cpu_kernels.pages import CPU, make_store, spans_for
from tests.engine.driver import load
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import make_model

# The first and the third layer have an MLP.
_RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 80,
    "moe_intermediate_size": 34,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
CONFIG = parse_config(_RAW)
SHARED = parse_config(_RAW | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 90})
GPT_OSS = parse_config(_RAW | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 12, "sliding_window": 9})
LLAMA_4 = parse_config(
    _RAW
    | {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": 12,
        "intermediate_size_mlp": 80,
        "intermediate_size": 34,
        "attention_chunk_size": 17,
        "no_rope_layer_interval": 2,
        "floor_scale": 5,
    }
)
# A shared expert that the router does not weigh.
GRANITE = parse_config(
    _RAW
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 12,
        "shared_intermediate_size": 90,
        "layer_types": ["attention"] * 4,
        "decoder_sparse_step": 1,
        "residual_multiplier": 0.4,
    }
)
DEEPSEEK = parse_config(CONFIGS["tiny-deepseek"])  # its routers have as many rows as two layers' of 4
NUM_TOKENS = 12


def make_weights(dtype: torch.dtype, config: DecoderConfig = CONFIG) -> DecoderWeights:
    weights = allocate_weights(config, dtype=dtype, device=CPU)
    fill_random(checkpoint_views(weights, config), seed=1, std=0.15)
    return weights


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (CONFIG, None),
        (CONFIG, "int8"),
        (SHARED, "int4"),
        (SHARED, None),
        (GPT_OSS, None),
        (GPT_OSS, "int4"),
        (LLAMA_4, None),
        (LLAMA_4, "int8"),
        (GRANITE, None),
    ],
)
def test_a_token_gets_the_same_bits_alone_as_in_any_crowd(
    kernels: CpuKernels, config: DecoderConfig, method: QuantizationMethod | None
) -> None:
    weights = make_weights(kernels.dtype, config)
    if method is not None:
        quantize_weights(weights, config, method)
    pack_projections(weights, kernels)
    decoder = CpuDecoder(config, weights, kernels)
    spans = spans_for([(0, 1), (0, 70), (16, 1), (0, 3), (17, 18)], 16)
    token_ids = torch.randint(64, (sum(span.num_new_tokens for span in spans),))

    def hidden(first: int, last: int, token_ids: torch.Tensor) -> torch.Tensor:
        ops = CpuOps(config, make_store(config, kernels.dtype), kernels)
        step = ops.plan(AttentionMetadata.from_spans(spans[first:last], block_size=16))
        return decoder.forward(token_ids, step)

    crowd = hidden(0, len(spans), token_ids)
    assert torch.isfinite(crowd).all()
    begin = 0
    for i, span in enumerate(spans):
        rows = slice(begin, begin := begin + span.num_new_tokens)
        assert torch.equal(hidden(i, i + 1, token_ids[rows]), crowd[rows])
    assert len(torch.unique(crowd, dim=0)) > len(spans)


@pytest.mark.parametrize("plain", [{0}, {1, 2, 3}, set()])
def test_experts_of_which_some_are_rounded_give_what_plain_ones_do(kernels: CpuKernels, plain: set[int]) -> None:
    config = parse_config(_RAW | {"moe_intermediate_size": 128, "intermediate_size": 128, "num_experts": 6})
    spans = spans_for([(0, 40)], 16)
    token_ids = torch.arange(40)

    def hidden(plain: set[int]) -> torch.Tensor:
        weights = make_weights(kernels.dtype, config)
        convert = quantizer(config, "int8", device=CPU)
        for layer in weights.layers:
            for number, expert in enumerate(layer.mlp.experts if isinstance(layer.mlp, Moe) else ()):
                rounded = convert("down", expert.down)
                assert isinstance(rounded, GroupedLinear)
                whole = Linear(weight=rounded.weight.dequantize(kernels.dtype), bias=None)
                expert.down = whole if number in plain else rounded
        pack_projections(weights, kernels, DepthParts(num_segments=num_segments(config)))
        ops = CpuOps(config, make_store(config, kernels.dtype), kernels)
        step = ops.plan(AttentionMetadata.from_spans(spans, block_size=16))
        return CpuDecoder(config, weights, kernels).forward(token_ids, step).float()

    assert num_segments(config) > 1
    torch.testing.assert_close(hidden(plain), hidden({*range(6)}), atol=0.1, rtol=0.05)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_model("qwen3_moe-dense-layer", hidden_size=64, head_dim=32, norm_topk_prob=True)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    return model, folder


def test_mixture_answers_as_transformers_cached_preempted_and_resumed_anywhere(mixture: tuple[Any, Path]) -> None:
    reference, folder = mixture
    executor = load(folder, num_blocks=20)
    assert executor.exact_resume
    assert_answers_are_those_of_transformers(reference, executor, num_tokens=NUM_TOKENS)


@pytest.mark.parametrize(("config", "num_router_rows"), [(CONFIG, 12), (SHARED, 13), (GRANITE, 24), (DEEPSEEK, 4)])
def test_floors_of_a_mixture_count_the_experts_of_one_token(config: DecoderConfig, num_router_rows: int) -> None:
    shape = model_shape(config)
    routers = 2 * num_router_rows * config.hidden_size
    assert make_weights(torch.bfloat16, config).num_bytes == shape.weight_bytes + shape.bytes_per_value * routers


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_router_of_a_rounded_mixture_keeps_its_precision(method: QuantizationMethod) -> None:
    weights, original = make_weights(torch.float32), make_weights(torch.float32)
    quantize_weights(weights, CONFIG, method)
    for layer, expected in zip(weights.layers, original.layers, strict=True):
        for place, before in zip(layer.places(), expected.places(), strict=True):
            assert (type(place.get()) is type(before.get())) == (place.field == "router")
