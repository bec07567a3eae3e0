"""Whole models on the compiled kernels: against transformers, and against our own decoder operation by operation."""

import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.decoder import Decoder
from engine.model.loader import load_weights
from engine.ops.cpu.library import CpuKernels
from engine.ops.cpu.linear import pack_projections
from engine.ops.cpu.ops import CpuDecoder, CpuOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.select import cpu_runs_kernels
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import Linear
from engine.weights.quantize import QuantizationMethod, quantize_weights
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

# Heads of 32 and more: the sizes that the kernels take.
_SIZES = {"hidden_size": 192, "intermediate_size": 74}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 64},
    "gemma3-every-third": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "granite": {},
    "llama": {},
    "llama-tied": {"attention_bias": True, "mlp_bias": True},
    "mistral-window": {},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "gpt_oss": {"head_dim": 32, "intermediate_size": 76},
    "llama4": {"head_dim": 32, "intermediate_size": 76},
    "llama4-bias": {"head_dim": 64},
    "mixtral-window": {"head_dim": 32, "intermediate_size": 76},
    "qwen2_moe": {},
    "qwen3_moe-window": {"head_dim": 32, "num_experts": 6},
}


def save(name: str, folder: Path) -> tuple[Any, Path]:
    model = make_model(name, **_SIZES | MODELS[name])
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))[1]


def chosen_operations(caplog: pytest.LogCaptureFixture) -> str:
    [record] = [record for record in caplog.records if record.message == "kernels chosen"]
    return str(record.__dict__["operations"])


def test_load_with_a_compiler_logs_compiled_kernels(
    llama: Path, float32_kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    assert float32_kernels.dtype is torch.float32  # without a compiler this is skipped
    if not cpu_runs_kernels():
        pytest.skip("this CPU's registers are too small for them")
    with caplog.at_level(logging.INFO):
        load(llama)
    assert chosen_operations(caplog) == "compiled for this CPU"


@pytest.mark.parametrize("has_small_registers", [True, False])
def test_load_with_small_registers_or_kernels_switched_off_logs_torch(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_small_registers: bool,
) -> None:
    if has_small_registers:
        monkeypatch.setattr("engine.ops.select.cpu_has", lambda flag: False)
    with caplog.at_level(logging.INFO):
        load(llama, kernels="auto" if has_small_registers else "torch")
    assert chosen_operations(caplog) == "torch"


def test_load_without_a_compiler_warns_and_answers(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.ops.select.cpu_has", lambda flag: flag in {"avx2", "fma"})
    monkeypatch.setenv("CXX", "")
    with caplog.at_level(logging.INFO):
        [answer] = Driver(load(llama)).generate([make_sequence(make_prompt(9))], num_tokens=3)
    assert len(answer) == 3
    assert chosen_operations(caplog) == "torch"
    assert "no C++ compiler" in caplog.text


@pytest.mark.parametrize("has_tiles", [True, False])
def test_bfloat16_on_tile_registers_is_compiled_where_the_compiler_knows_them(
    llama: Path, library: Path, monkeypatch: pytest.MonkeyPatch, has_tiles: bool
) -> None:
    """Vectors there are slower than oneDNN's tiles; speculation needs compiled products."""
    kernels = CpuKernels(library, torch.bfloat16)
    monkeypatch.setattr("engine.ops.select.cpu_has", lambda flag: True)
    monkeypatch.setattr(kernels, "has_tiles", lambda: has_tiles)
    monkeypatch.setattr("engine.loading.load_cpu_kernels", lambda dtype: kernels)
    executor = load(llama, dtype="bfloat16")
    assert executor.verifies_drafts is has_tiles
    [answer] = Driver(executor).generate([make_sequence(make_prompt(9))], num_tokens=3)
    assert len(answer) == 3


@pytest.mark.parametrize("kernels_option", ["auto", "torch"])
def test_generate_when_greedy_equals_transformers(checkpoint: tuple[Any, Path], kernels_option: str) -> None:
    reference, folder = checkpoint
    prompts = [make_prompt(num, seed=num) for num in (1, 7, 40)]
    driver = Driver(load(folder, kernels=kernels_option))
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=9, chunk_size=7)
    assert answers == [reference_tokens(reference, p, 9, guess=a) for p, a in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("checkpoint", ["llama-tied", "qwen3"], indirect=True)  # with biases, and with norms
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_model_answers_alone_as_in_a_batch_and_in_chunks(
    checkpoint: tuple[Any, Path], quantization: str
) -> None:
    executor = load(checkpoint[1], quantization=quantization)
    prompts = [make_prompt(num, seed=num) for num in (3, 20, 9)]
    alone = [Driver(executor).generate([make_sequence(prompt)], num_tokens=6)[0] for prompt in prompts]
    together = Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=6, chunk_size=7)
    assert together == alone


@pytest.mark.parametrize("checkpoint", ["llama-tied", "qwen3"], indirect=True)
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.08), ("int4", 0.8)])
def test_quantized_hidden_states_are_near_those_of_the_checkpoint(
    checkpoint: tuple[Any, Path], quantization: QuantizationMethod, error: float, float32_kernels: CpuKernels
) -> None:
    described = ModelDescription.read(
        EngineOptions(model_dir=checkpoint[1], model_name="tiny", dtype="float32", device="cpu", block_size=4)
    )
    config = described.config
    assert isinstance(config, DecoderConfig)
    hidden = []
    for method in (None, quantization):
        weights = load_weights(described.files, config, dtype=torch.float32, device=described.device)
        if method is not None:
            quantize_weights(weights, config, method)
        pack_projections(weights, float32_kernels)
        store = TorchKvStore(described.shape, 16, device=described.device)
        span = SequenceSpan(num_computed=0, num_new_tokens=21, block_table=array("i", range(16)))
        step = CpuOps(config, store, float32_kernels).plan(AttentionMetadata.from_spans([span], block_size=4))
        hidden.append(CpuDecoder(config, weights, float32_kernels).forward(torch.arange(21), step))
    # The first token only: later ones pass a softmax, which in random models turns small errors into large ones.
    distance = torch.linalg.vector_norm(hidden[1][0] - hidden[0][0]) / torch.linalg.vector_norm(hidden[0][0])
    assert 0 < float(distance) < error


def test_forward_with_one_call_per_layer_equals_operation_by_operation(
    checkpoint: tuple[Any, Path], float32_kernels: CpuKernels
) -> None:
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
    for found, expected in zip(*results, strict=True):
        if config.experts is None:
            assert torch.equal(found, expected)
        else:  # torch rounds the experts' weights otherwise
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
