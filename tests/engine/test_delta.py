"""Gated delta nets on our decoder: Qwen3-Next and Qwen3.5 answer as transformers does, on every way.

On the compiled kernels, where there is a compiler, and on torch's.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.random_models import CONFIGS
from common.sampling import SamplingParams
from engine.model.checkpoints.quantizing import QuantizeFailed, Rounding, quantize_checkpoint
from engine.model.floors import model_shape
from engine.model.transformers_decoder import TransformersDecoder
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore, kv_shape, windowed_layers
from engine.weights.config import UnsupportedModel, parse_config
from engine.weights.layout import allocate_weights
from engine.weights.quantize import QuantizationMethod
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

NUM_TOKENS = 8
BLOCK_SIZE = 4
PROMPTS = [make_prompt(num, seed=num) for num in (3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1)]
# Heads that the kernels take, half of each rotated.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model that the kernels take, and its checkpoint."""
    model = make_model(request.param, **SIZES)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers_are_those_of_transformers_alone_batched_and_in_chunks_cut_anywhere(
    saved: tuple[Any, Path], kernels: str
) -> None:
    reference, folder = saved
    executor = load(folder, kernels=kernels, block_size=BLOCK_SIZE)
    assert not isinstance(executor.model, TransformersDecoder)
    assert not executor.verifies_drafts
    alone = [Driver(executor).generate([make_sequence(prompt)], num_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]
    assert alone == [
        reference_tokens(reference, prompt, NUM_TOKENS, guess=answer)
        for prompt, answer in zip(PROMPTS, alone, strict=True)
    ]
    for chunk_size in range(1, 3 * BLOCK_SIZE + 1):
        sequences = [make_sequence(prompt) for prompt in PROMPTS]
        answers = Driver(executor, seed=1).generate(sequences, num_tokens=NUM_TOKENS, chunk_size=chunk_size)
        assert answers == alone, f"chunks of {chunk_size}"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers_are_those_of_transformers_cached_preempted_and_resumed_anywhere(
    saved: tuple[Any, Path], kernels: str
) -> None:
    reference, folder = saved
    executor = load(folder, kernels=kernels, num_blocks=20)
    assert executor.exact_resume
    assert_answers_are_those_of_transformers(reference, executor, num_tokens=NUM_TOKENS)


def test_each_of_n_samples_is_the_one_that_it_is_alone(saved: tuple[Any, Path]) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=4)
    executor = load(saved[1])
    (result,) = Driver(executor).step([(make_sequence(PROMPTS[0], sampling=sampling), len(PROMPTS[0]))])
    for sample_index, sampled in enumerate(result.sampled):
        alone = make_sequence(PROMPTS[0], sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = sample_index
        (single,) = Driver(executor, seed=2).step([(alone, len(PROMPTS[0]))])
        assert [each.token_id for each in single.sampled] == [sampled.token_id]


def test_pages_that_hold_nan_of_another_request_change_nothing(saved: tuple[Any, Path]) -> None:
    clean, dirty = load(saved[1]), load(saved[1])
    assert isinstance(dirty.kv, TorchKvStore)
    for parts in dirty.kv.layers:
        for pages in parts:
            pages.fill_(float("nan"))
    found, expected = (
        Driver(each).generate([make_sequence(p) for p in PROMPTS], num_tokens=NUM_TOKENS, chunk_size=5)
        for each in (dirty, clean)
    )
    assert found == expected


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])  # with sizes that divide neither
def test_rounded_weights_answer_the_same_alone_and_in_a_batch(
    name: str, method: QuantizationMethod, checkpoint: Callable[[str], Path]
) -> None:
    executor = load(checkpoint(name), quantization=method)
    alone = [Driver(executor).generate([make_sequence(prompt)], num_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]
    assert Driver(executor).generate([make_sequence(p) for p in PROMPTS], num_tokens=NUM_TOKENS) == alone


def test_state_of_qwen3_next_takes_as_many_bytes_as_3216_tokens() -> None:
    config = parse_config(CONFIGS["qwen3-next-80b-a3b"])
    windowed = windowed_layers(config, 4096)
    shape = kv_shape(config, block_size=16, dtype=torch.bfloat16, fingerprint="test", windowed=windowed)
    assert shape.bytes_per_token == 24_576  # of keys and values of 12 layers
    assert shape.window_page_bytes == 3216 * shape.bytes_per_token
    assert config.recurrent is not None
    assert config.recurrent.state_size == 3 * 8192 + 32 * 128 * 128


def test_floors_count_recurrent_layers_and_gates() -> None:
    config = parse_config(CONFIGS["tiny-qwen3-next"])
    shape = model_shape(config)
    weights = allocate_weights(config, dtype=torch.bfloat16, device=torch.device("meta"))
    routers = config.num_layers * 2 * 9 * config.hidden_size  # whose bytes the floors leave out
    assert weights.num_bytes == shape.weight_bytes + routers
    assert (shape.kv_bytes_per_token, shape.flops_per_pair) == (2 * 2 * 2 * 64, 4 * 4 * 64)  # of one layer


def test_recurrent_layers_on_a_gpu_or_in_a_draft_model_are_refused(saved: tuple[Any, Path]) -> None:
    options = EngineOptions(model_dir=saved[1], model_name="tiny", device="cpu")
    with pytest.raises(UnsupportedModel, match="recurrent layers are computed on CPUs only"):
        ModelDescription.read(options, may_have_window_pages=False)


def test_checkpoint_is_rounded_but_not_for_a_text(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    rounding, folder = Rounding(bits=8, group_size=-1), checkpoint("qwen3_5")
    for_text = dataclasses.replace(rounding, windows=[list(PROMPTS[0])])
    with pytest.raises(QuantizeFailed, match="cannot round recurrent layers for a text"):
        quantize_checkpoint(folder, tmp_path / "quantized", for_text, print)
    quantize_checkpoint(folder, tmp_path / "quantized", rounding, print)
    answers = [
        Driver(load(each)).generate([make_sequence(p) for p in PROMPTS], num_tokens=1)
        for each in (folder, tmp_path / "quantized")
    ]
    assert answers[0] == answers[1], "8 bits change no first token here"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3 do not divide among linear_num_key_heads: 2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"linear_conv_kernel_dim": 1000}, "linear_conv_kernel_dim: 1000 is not supported"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types: mamba is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 2"),
        ({"layer_types": ["linear_attention"] * 2}, "models without any full_attention are not supported"),
        ({"full_attention_interval": "2"}, "full_attention_interval is '2'"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor: 0.01 of 64 values are no pairs"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ],
)
def test_config_that_makes_no_sense_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**CONFIGS["tiny-qwen3-next"], **overrides})


def test_config_without_recurrent_layers_has_attention_alone() -> None:
    config = parse_config({**CONFIGS["tiny-qwen3-next"], "layer_types": ["full_attention"] * 2})
    assert config.recurrent is None
    assert (config.rope_dim, config.has_gated_attention) == (32, True)
