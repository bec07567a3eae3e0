"""The executor: greedy tokens against transformers through chunks, mixed steps and scrambled pages."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.sampling import SamplingParams
from engine.executor import Logprobs, Sampled
from engine.memory import HostMemory, MemoryShare
from tests.engine.tiny_models import (
    GREEDY,
    MAX_MODEL_LEN,
    MODELS,
    VOCAB_SIZE,
    Driver,
    load,
    make_model,
    make_prompt,
    make_sequence,
    reference_tokens,
)

NUM_TOKENS = 20
# Around the block size of 4: below, at and above a boundary; and the one-token prompt.
PROMPT_LENS = (1, 3, 4, 5, 23, 40)


@pytest.mark.parametrize("name", MODELS)
def test_execute_when_greedy_in_mixed_batches_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    driver = Driver(load(tmp_path))
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=7)
    assert answers == [reference_tokens(reference, p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_execute_when_chunked_any_way_answers_the_same(mixed_windows: Path, chunk_size: int, block_size: int) -> None:
    prompts = [make_prompt(num, seed=num) for num in (33, 12, 32)]
    whole = Driver(load(mixed_windows)).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS)
    executor = load(mixed_windows, block_size=block_size, num_blocks=256)
    sequences = [make_sequence(p, block_size=block_size) for p in prompts]
    assert Driver(executor, seed=1).generate(sequences, num_tokens=NUM_TOKENS, chunk_size=chunk_size) == whole


def test_execute_when_prompt_has_n_samples_draws_each_with_its_own_noise(qwen3: Path) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=8)
    prompt = make_prompt(10)
    (result,) = Driver(load(qwen3)).step([(make_sequence(prompt, sampling=sampling), 10)])
    token_ids = [sampled.token_id for sampled in result.sampled]
    assert len(token_ids) == 8
    assert len(set(token_ids)) > 1
    for j, token_id in enumerate(token_ids):
        alone = make_sequence(prompt, sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = j
        (single,) = Driver(load(qwen3)).step([(alone, 10)])
        assert [sampled.token_id for sampled in single.sampled] == [token_id]


def test_execute_when_sampled_in_a_batch_answers_as_alone(qwen3: Path) -> None:
    sampling = SamplingParams(temperature=3.0, seed=11, max_tokens=64)
    prompt = make_prompt(17)
    (alone,) = Driver(load(qwen3)).generate([make_sequence(prompt, sampling=sampling)], num_tokens=NUM_TOKENS)
    crowd = [make_sequence(make_prompt(num, seed=num)) for num in (40, 2, 9)]
    sequences = [*crowd, make_sequence(prompt, sampling=sampling)]
    assert Driver(load(qwen3), seed=2).generate(sequences, num_tokens=NUM_TOKENS, chunk_size=6)[-1] == alone


def test_execute_when_chunk_ends_inside_the_prompt_samples_nothing(qwen3: Path) -> None:
    driver = Driver(load(qwen3))
    sequence = make_sequence(make_prompt(10))
    (result,) = driver.step([(sequence, 9)])
    assert (result.sampled, result.prompt_logprobs) == ([], [])
    (result,) = driver.step([(sequence, 1)])
    assert len(result.sampled) == 1


def test_execute_when_batch_is_empty_returns_nothing(qwen3: Path) -> None:
    assert load(qwen3).execute([]) == []


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_execute_when_prompt_logprobs_are_asked_for_tells_of_every_prompt_token(qwen3: Path, chunk_size: int) -> None:
    prompt = make_prompt(150)
    reference = make_model("qwen3")
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    sequence = make_sequence(prompt, sampling=dataclasses.replace(GREEDY, num_prompt_logprobs=3))
    driver = Driver(load(qwen3))
    found: list[Logprobs] = []
    while sequence.num_output_tokens < 3:
        num_new = min(chunk_size, sequence.num_tokens - sequence.num_computed)
        found.extend(driver.step([(sequence, num_new)])[0].prompt_logprobs)
    assert [entry.token_id for entry in found] == list(prompt[1:])
    for position, entry in enumerate(found):
        best = expected[position].topk(3)
        assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_execute_when_logprobs_are_asked_for_tells_of_the_sampled_token(qwen3: Path) -> None:
    sequence = make_sequence(make_prompt(9), sampling=dataclasses.replace(GREEDY, num_logprobs=2))
    (result,) = Driver(load(qwen3)).step([(sequence, 9)])
    (sampled,) = result.sampled
    assert isinstance(sampled, Sampled)
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_id == sampled.token_id == sampled.logprobs.top[0][0]


def test_execute_when_called_leaves_the_sequence_alone(qwen3: Path) -> None:
    sequence = make_sequence(make_prompt(9))
    driver = Driver(load(qwen3))
    driver.step([(sequence, 5)])
    before = (sequence.num_computed, sequence.token_ids[:], list(sequence.block_table))
    driver.step([(make_sequence(make_prompt(3)), 3)])
    assert (sequence.num_computed, sequence.token_ids, list(sequence.block_table)) == before


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


def test_load_executor_when_no_pages_are_given_fills_half_of_its_share_of_the_memory(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(available_bytes=1 << 30, process_bytes=100 << 20)
    monkeypatch.setattr("engine.loading.measure_host", lambda: memory)
    executor = load(qwen3, num_blocks=None, memory_share=MemoryShare(host_bytes=110 << 20))
    assert executor.kv.num_blocks == (5 << 20) // executor.kv.shape.block_bytes


def test_load_executor_when_max_model_len_exceeds_the_checkpoint_keeps_the_checkpoints(qwen3: Path) -> None:
    assert load(qwen3, max_model_len=10 * MAX_MODEL_LEN).max_model_len == MAX_MODEL_LEN


def test_loading_when_imported_does_not_import_transformers() -> None:
    program = "import sys, engine.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


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
