"""Whole models on the compiled kernels: against transformers, and against our own decoder operation by operation."""

import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.loading import load_executor
from engine.model.precision import cpu_has
from engine.model.weights import Linear
from engine.ops.cpu.decoder import CpuDecoder
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import pack_projections
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.options import EngineOptions, ModelDescription
from tests.engine.tiny_models import Driver, load, make_prompt, make_sequence, reference_tokens

_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 192,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Heads of 32 and more: the sizes that the kernels take.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=7)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=64)),
}


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    torch.manual_seed(11)
    model = MODELS[request.param]().eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def chosen_operations(caplog: pytest.LogCaptureFixture) -> str:
    [record] = [record for record in caplog.records if record.message == "kernels chosen"]
    return str(record.__dict__["operations"])


def test_load_when_there_is_a_compiler_says_that_compiled_kernels_run(
    checkpoint: tuple[Any, Path], float32_kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    assert float32_kernels.dtype is torch.float32  # without a compiler this is skipped
    if not cpu_has("avx512f"):
        pytest.skip("this CPU's vectors are too short for them")
    with caplog.at_level(logging.INFO):
        load(checkpoint[1])
    assert chosen_operations(caplog) == "compiled for this CPU"


def test_load_when_the_cpu_has_short_vectors_says_that_torch_runs(
    checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.ops.select.cpu_has", lambda flag: False)
    with caplog.at_level(logging.INFO):
        load(checkpoint[1])
    assert chosen_operations(caplog) == "torch"


def test_load_when_kernels_are_switched_off_says_that_torch_runs(
    checkpoint: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(checkpoint[1], kernels="torch")
    assert chosen_operations(caplog) == "torch"


def test_load_when_there_is_no_compiler_warns_and_answers(
    checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.ops.select.cpu_has", lambda flag: flag == "avx512f")
    monkeypatch.setenv("CXX", "")
    with caplog.at_level(logging.INFO):
        [answer] = Driver(load(checkpoint[1])).generate([make_sequence(make_prompt(9))], num_tokens=3)
    assert len(answer) == 3
    assert chosen_operations(caplog) == "torch"
    assert "no C++ compiler" in caplog.text


@pytest.mark.parametrize("kernels_option", ["auto", "torch"])
def test_execute_when_greedy_equals_transformers(checkpoint: tuple[Any, Path], kernels_option: str) -> None:
    reference, folder = checkpoint
    prompts = [make_prompt(num, seed=num) for num in (1, 7, 40)]
    driver = Driver(load(folder, kernels=kernels_option))
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=9, chunk_size=7)
    assert answers == [reference_tokens(reference, p, 9) for p in prompts]


def test_execute_when_weights_are_quantized_answers_all_the_same(checkpoint: tuple[Any, Path]) -> None:
    """8-bit projections are called one by one, between the same kernels."""
    _, folder = checkpoint
    options = EngineOptions(
        model_dir=folder, model_name="tiny", dtype="float32", device="cpu", num_blocks=32, quantization="int8"
    )
    executor: Any = load_executor(options)
    [answer] = Driver(executor).generate([make_sequence(make_prompt(20), block_size=16)], num_tokens=5)
    assert len(answer) == 5


def test_forward_when_layers_are_one_call_equals_operation_by_operation(
    checkpoint: tuple[Any, Path], float32_kernels: CpuKernels
) -> None:
    from engine.kv_cache import TorchKvStore
    from engine.model.config import DecoderConfig
    from engine.model.decoder import Decoder
    from engine.model.loader import load_weights
    from engine.ops.cpu.ops import CpuOps

    described = ModelDescription.read(
        EngineOptions(model_dir=checkpoint[1], model_name="tiny", dtype="float32", device="cpu", block_size=4)
    )
    config = described.config
    assert isinstance(config, DecoderConfig)
    weights = load_weights(described.files, config, dtype=torch.float32, device=described.device)
    assert isinstance(weights.head, Linear)
    pack_projections(weights, float32_kernels)
    results = []
    for make in (lambda: Decoder(config, weights), lambda: CpuDecoder(config, weights, float32_kernels)):
        store = TorchKvStore(described.shape, 16, device=described.device)
        ops, model = CpuOps(config, store, float32_kernels), make()
        for num_computed, num_new in ((0, 21), (21, 1)):
            span = SequenceSpan(
                num_computed=num_computed, num_new_tokens=num_new, block_table=array("i", reversed(range(16)))
            )
            step = ops.plan(AttentionMetadata.from_spans([span], block_size=4))
            hidden = model.forward(torch.arange(num_new), step)
        results.append((hidden, model.logits(hidden)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
