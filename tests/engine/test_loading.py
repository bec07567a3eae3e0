"""Loading: pages that fit, kernels and end tokens as configured, and the real default model, token for token."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from common.model_files import default_model_dir, is_checkpoint
from engine.floors import RateMeter
from engine.memory import HostMemory, MemoryShare
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, reference_tokens

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "The three laws of thermodynamics say that",
    "def fibonacci(n: int) -> int:\n    " + "# Returns the n-th number of the sequence.\n    " * 12,
)


def test_load_executor_when_given_a_budget_fills_it_with_pages_and_says_so(
    qwen3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.loading"):
        executor = load(qwen3, num_blocks=None, kv_memory_bytes=100_000, dtype="bfloat16", max_model_len=99)
    shape = executor.kv.shape
    assert shape.bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert executor.kv.num_blocks == 100_000 // (4 * shape.bytes_per_token)
    assert (executor.max_model_len, executor.vocab_size, executor.model_name) == (99, VOCAB_SIZE, "tiny")
    (record,) = [r for r in caplog.records if r.message == "model loaded"]
    told = {
        key: record.__dict__[key] for key in ("dtype", "device", "kv_bytes_per_token", "num_blocks", "num_kv_tokens")
    }
    assert told == {
        "dtype": "bfloat16",
        "device": "cpu",
        "kv_bytes_per_token": shape.bytes_per_token,
        "num_blocks": executor.kv.num_blocks,
        "num_kv_tokens": 4 * executor.kv.num_blocks,
    }


def test_load_executor_without_a_size_fills_half_of_its_share_of_the_memory(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(available_bytes=1 << 30, process_bytes=100 << 20)
    monkeypatch.setattr("engine.loading.measure_host", lambda: memory)
    executor = load(qwen3, num_blocks=None, memory_share=MemoryShare(host_bytes=110 << 20))
    assert executor.kv.num_blocks == (5 << 20) // executor.kv.shape.block_bytes


def test_load_executor_keeps_the_checkpoints_length_when_max_model_len_exceeds_it(qwen3: Path) -> None:
    assert load(qwen3, max_model_len=10 * MAX_MODEL_LEN).max_model_len == MAX_MODEL_LEN


def test_loading_when_imported_does_not_import_transformers() -> None:
    program = "import sys, engine.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [5, 9]}, {"eos_token_id": 3}, {5, 9}),
        ({"eos_token_id": 5}, {"eos_token_id": 3}, {5}),
        ({}, {"eos_token_id": 3}, {3}),
        (None, {"eos_token_id": [3, 4]}, {3, 4}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {}, set()),
    ],
)
def test_load_executor_when_eos_is_named_somewhere_finds_it(
    qwen3: Path,
    tmp_path: Path,
    generation_config: dict[str, object] | None,
    config: dict[str, object],
    expected: set[int],
) -> None:
    raw = json.loads((qwen3 / "config.json").read_text())
    raw.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
    (tmp_path / "model.safetensors").symlink_to(qwen3 / "model.safetensors")
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert load(tmp_path).eos_token_ids == expected


def test_load_executor_when_pages_exceed_memory_refuses_before_taking_it(qwen3: Path) -> None:
    with pytest.raises(ValueError, match="lower kv_memory_gib"):
        load(qwen3, num_blocks=1 << 40)


@pytest.mark.model
@pytest.mark.skipif(not is_checkpoint(default_model_dir()), reason="run `kvrelay fetch-model` once")
def test_generate_when_default_model_is_greedy_in_float32_equals_transformers() -> None:
    model_dir = default_model_dir()
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    driver = Driver(load(model_dir, block_size=16, num_blocks=64))
    sequences = [make_sequence(prompt, block_size=16) for prompt in prompts]
    answers = driver.generate(sequences, num_tokens=16, chunk_size=50)  # into another page
    found = zip(prompts, answers, strict=True)
    assert answers == [reference_tokens(reference, prompt, 16, guess=answer) for prompt, answer in found]
    assert tokenizer.decode(answers[0]).startswith("The capital of France is Paris.")


@pytest.mark.parametrize(
    ("flops_per_s", "sizes"),
    [
        pytest.param(7e8, [256], id="a processor that emulates bfloat16"),
        pytest.param(2e10, [256, 1024], id="a slow core"),
        pytest.param(1e12, [256, 1024, 2048], id="AMX"),
    ],
)
def test_start_is_not_held_up_by_measuring_a_slow_processor(
    monkeypatch: pytest.MonkeyPatch, flops_per_s: float, sizes: list[int]
) -> None:
    tried: list[int] = []

    def matmul_s(_meter: RateMeter, size: int) -> float:
        tried.append(size)
        return 2 * size**3 / flops_per_s

    monkeypatch.setattr(RateMeter, "_matmul_s", matmul_s)

    rates = RateMeter(read_bytes=1 << 12).measure()

    assert tried == sizes
    assert rates.flops_per_s == pytest.approx(flops_per_s)
