"""Loading: pages that fit, kernels and end tokens as configured, and the real default model, token for token."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from common.model_files import default_model_dir, is_checkpoint
from engine.device.memory import HostMemory, MemoryShare, NoRoomForPages
from engine.model.floors import RateMeter
from engine.options import eos_token_ids
from engine.runner import ModelExecutor
from engine.weights.config import UnsupportedModel
from tests.engine.driver import GREEDY, Driver, load, make_sequence
from tests.engine.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, reference_tokens

PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite the numbers from one to ten.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    " + "# Returns the n-th number of the sequence.\n    " * 5,
)
CAPITAL = "The capital of France is Paris."


def test_load_executor_when_given_a_budget_fills_it_with_pages_and_says_so(
    qwen3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.loading"):
        executor = load(qwen3, num_blocks=None, kv_memory_bytes=100_000, dtype="bfloat16", max_model_len=99)
    shape = executor.kv.shape
    assert shape.bytes_per_token == 2 * 2 * 2 * 16 * 2
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


def test_max_model_len_beyond_the_checkpoints_length_is_refused_by_name(qwen3: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{MAX_MODEL_LEN + 1} tokens: tiny takes {MAX_MODEL_LEN};") as refused:
        load(qwen3, max_model_len=MAX_MODEL_LEN + 1)
    assert refused.value.key == "model.max_model_len"


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [5, 9]}, {"eos_token_id": 3}, {3, 5, 9}),
        ({"eos_token_id": 5}, {"text_config": {"eos_token_id": 3}}, {3, 5}),
        ({"eos_token_id": -1}, {"eos_token_id": [3, VOCAB_SIZE]}, {3}),
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


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "<s>"}, "9": {"content": "</s>"}}},
        {"eos_token": {"content": "</s>"}},
    ],
    ids=["by id", "in tokenizer.json"],
)
def test_the_tokenizers_own_end_ends_answers_too(qwen3: Path, tmp_path: Path, config: dict[str, object]) -> None:
    raw = json.loads((qwen3 / "config.json").read_text())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 9, "a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path, {**raw, "eos_token_id": 3}) == {3, 9}


def test_load_executor_when_pages_exceed_memory_refuses_before_taking_it(qwen3: Path) -> None:
    with pytest.raises(NoRoomForPages, match="lower kv_memory_gib"):
        load(qwen3, num_blocks=1 << 40)


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer() -> tokenizers.Tokenizer:
    if not is_checkpoint(default_model_dir()):
        pytest.skip("run `kvrelay fetch-model` once")
    return tokenizers.Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))


def load_default(**options: Any) -> ModelExecutor[Any]:
    """Return the default model in float32: in bfloat16 the processor's own order of sums decides near ties."""
    return load(default_model_dir(), block_size=16, num_blocks=64, **options)


@pytest.fixture(name="answers", scope="module")
def _answers(tokenizer: tokenizers.Tokenizer) -> dict[tuple[int, ...], list[int]]:
    """Return the greedy answers of the default model to some prompts."""
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in PROMPTS]
    sequences = [make_sequence(prompt, block_size=16) for prompt in prompts]
    found = Driver(load_default()).generate(sequences, num_tokens=12, chunk_size=50)  # into another page
    return dict(zip(prompts, found, strict=True))


@pytest.mark.model
def test_generate_when_default_model_is_greedy_in_float32_equals_transformers(
    answers: dict[tuple[int, ...], list[int]], tokenizer: tokenizers.Tokenizer
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32)
    for prompt, answer in answers.items():
        assert answer == reference_tokens(reference, prompt, 12, guess=answer)
    assert tokenizer.decode(next(iter(answers.values()))).startswith(CAPITAL)


@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_default_model_keeps_its_greedy_answers_with_coded_pages(
    answers: dict[tuple[int, ...], list[int]], tokenizer: tokenizers.Tokenizer, kv_dtype: str
) -> None:
    """Rule: int8 gives the twelve tokens of plain pages; int4 knows the same capital.

    The second prompt has a near tie.
    """
    executor = load_default(kv_dtype=kv_dtype)
    for prompt, answer in list(answers.items())[:1]:
        # It is the greedy answer if each token is the likeliest behind those before. The second step reads coded pages.
        sequence = make_sequence([*prompt, *answer], sampling=replace(GREEDY, num_prompt_logprobs=1), block_size=16)
        driver, lengths = Driver(executor), (len(prompt), len(answer))
        entries = [entry for length in lengths for entry in driver.step([(sequence, length)])[0].prompt_logprobs]
        likeliest = [entry.top[0][0] for entry in entries[-len(answer) :]]
        if kv_dtype == "int8":
            assert likeliest == answer
        else:
            assert tokenizer.decode(likeliest).startswith(CAPITAL)


@pytest.mark.parametrize(
    ("flops_per_s", "sizes"),
    [
        pytest.param(7e8, [256], id="a processor that emulates bfloat16"),
        pytest.param(7e10, [256, 1024], id="a core"),
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
