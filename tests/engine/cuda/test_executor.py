"""The device executor, a step ahead of what the host knows: against transformers, and against the CPU's executor."""

import dataclasses
import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import EngineFault
from common.sampling import SamplingParams
from engine.executor import Logprobs, ScheduledSequence
from engine.kv_cache import TorchKvStore
from engine.sequence import Sequence
from tests.engine.cuda.support import DEVICE, OverlapDriver, load_device
from tests.engine.tiny_models import (
    GREEDY,
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
# One of each kind; the decoder and the operations are those of the CPU's executor, which tries them all.
MODELS = ("llama", "llama-attention-bias", "mistral-window", "qwen2-tied", "qwen3-layer-types")

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.0, "num_logprobs": 2},
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.7, "num_logprobs": 0},
    {"min_p": 0.1, "temperature": 3.0},
    {"logit_bias": ((3, 4.0), (7, -50.0)), "temperature": 0.0},
    {"min_tokens": 15, "stop_token_ids": frozenset({5, 9})},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6, "top_k": 30, "top_p": 0.9},
]


@pytest.mark.parametrize("name", MODELS)
def test_launch_when_greedy_a_step_ahead_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    driver = OverlapDriver(load_device(tmp_path))
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=7)
    assert answers == [reference_tokens(reference, p, NUM_TOKENS) for p in prompts]
    assert driver.num_overlapped > len(prompts) * (NUM_TOKENS - 2)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_launch_when_chunked_any_way_answers_the_same(mixed_windows: Path, chunk_size: int, block_size: int) -> None:
    prompts = [make_prompt(num, seed=num) for num in (33, 12, 32)]
    whole = Driver(load(mixed_windows)).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS)
    executor = load_device(mixed_windows, block_size=block_size, num_blocks=256)
    sequences = [make_sequence(p, block_size=block_size) for p in prompts]
    assert OverlapDriver(executor, seed=1).generate(sequences, num_tokens=NUM_TOKENS, chunk_size=chunk_size) == whole


def sampled_sequences(num: int) -> list[Sequence]:
    return [
        make_sequence(
            make_prompt(3 + 5 * i, seed=i),
            sampling=SamplingParams(seed=i, max_tokens=64, **SAMPLINGS[i % len(SAMPLINGS)]),
        )
        for i in range(num)
    ]


def test_launch_when_rows_are_sampled_in_every_way_equals_the_other_executor(qwen3: Path) -> None:
    expected = Driver(load(qwen3, num_blocks=512)).generate(sampled_sequences(10), num_tokens=NUM_TOKENS)
    driver = OverlapDriver(load_device(qwen3, num_blocks=512, max_running=16))
    assert driver.generate(sampled_sequences(10), num_tokens=NUM_TOKENS) == expected
    assert driver.num_overlapped


@pytest.mark.parametrize("max_graph_seqs", [1, 3, 8])
def test_launch_when_batch_exceeds_the_largest_graph_answers_the_same(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, max_graph_seqs: int
) -> None:
    expected = Driver(load(qwen3)).generate(sampled_sequences(5), num_tokens=NUM_TOKENS)
    monkeypatch.setattr("engine.cuda.loading._MAX_GRAPH_SEQS", max_graph_seqs)
    assert OverlapDriver(load_device(qwen3)).generate(sampled_sequences(5), num_tokens=NUM_TOKENS) == expected


def test_launch_when_rows_change_hands_and_pages_are_taken_answers_the_same(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sequences take turns on three rows, and come back with other pages, or with the same in another order."""
    monkeypatch.setattr("engine.cuda.loading.MAX_N", 3)
    prompts = [make_prompt(num, seed=num) for num in (9, 14, 5, 22, 17, 8, 11)]
    expected = Driver(load(qwen3)).generate([make_sequence(p) for p in prompts], num_tokens=12)
    driver = OverlapDriver(load_device(qwen3, max_running=3), seed=3)
    sequences = [make_sequence(p) for p in prompts]
    for num_tokens in (3, 4, 7, 12):
        for first in range(0, len(sequences), 3):
            driver.generate(sequences[first : first + 3], num_tokens=num_tokens)
            if num_tokens != 4:
                for sequence in sequences[first : first + 3]:
                    driver.preempt(sequence)
    assert [list(s.output_token_ids) for s in sequences] == expected


@pytest.mark.parametrize("num_prompt_tokens", [1, 10])
def test_launch_when_prompt_has_n_samples_draws_each_with_its_own_noise(qwen3: Path, num_prompt_tokens: int) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=8)
    prompt = make_prompt(num_prompt_tokens)
    (expected,) = Driver(load(qwen3)).step([(make_sequence(prompt, sampling=sampling), num_prompt_tokens)])
    executor = load_device(qwen3)
    sequence = make_sequence(prompt, sampling=sampling)
    sequence.block_table.extend(range(3))
    (result,) = executor.launch([ScheduledSequence(sequence, num_prompt_tokens, 8)]).results()
    assert result == expected
    assert len({sampled.token_id for sampled in result.sampled}) > 1


def test_launch_when_chunk_ends_inside_the_prompt_samples_nothing(qwen3: Path) -> None:
    executor = load_device(qwen3)
    sequence = make_sequence(make_prompt(10))
    sequence.block_table.extend(range(3))
    (result,) = executor.launch([ScheduledSequence(sequence, 9, 0)]).results()
    assert (result.sampled, result.prompt_logprobs) == ([], [])


def test_launch_when_batch_is_empty_returns_nothing(qwen3: Path) -> None:
    assert load_device(qwen3).launch([]).results() == []


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_launch_when_prompt_logprobs_are_asked_for_equals_the_other_executor(qwen3: Path, chunk_size: int) -> None:
    def told(driver: Driver | OverlapDriver) -> list[Logprobs]:
        sequence = make_sequence(
            make_prompt(150), sampling=dataclasses.replace(GREEDY, num_prompt_logprobs=3, num_logprobs=1)
        )
        found: list[Logprobs] = []
        while sequence.num_output_tokens < 3:
            num_new = min(chunk_size, sequence.num_tokens - sequence.num_computed)
            if isinstance(driver, Driver):
                results = driver.step([(sequence, num_new)])
            else:
                num_samples = int(sequence.num_computed + num_new == sequence.num_tokens)
                driver.launch([ScheduledSequence(sequence, num_new, num_samples)])
                driver.take()
                results = driver.results
            found.extend(results[0].prompt_logprobs)
            found.extend(s.logprobs for s in results[0].sampled if s.logprobs)
        return found

    expected, found = told(Driver(load(qwen3))), told(OverlapDriver(load_device(qwen3)))
    assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def test_launch_leaves_the_sequences_alone_and_results_do_not_read_them(qwen3: Path) -> None:
    executor = load_device(qwen3)
    sequence = make_sequence(make_prompt(9), sampling=dataclasses.replace(GREEDY, num_prompt_logprobs=1))
    sequence.block_table.extend(range(3))
    before = (sequence.num_computed, list(sequence.token_ids), list(sequence.block_table))
    handle = executor.launch([ScheduledSequence(sequence, 9, 1)])
    assert (sequence.num_computed, list(sequence.token_ids), list(sequence.block_table)) == before
    del sequence.token_ids[:]
    sequence.block_table = array("i")
    (result,) = handle.results()
    assert (len(result.sampled), len(result.prompt_logprobs)) == (1, 8)


def test_launch_when_a_step_fails_half_way_the_next_ones_answer_the_same(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Driver(load(qwen3)).generate(sampled_sequences(4), num_tokens=8)
    executor = load_device(qwen3)
    sequences = sampled_sequences(4)
    for sequence in sequences:
        sequence.block_table.extend(range(30))
    batch = [ScheduledSequence(sequence, sequence.num_tokens, 1) for sequence in sequences]
    for broken in (
        "engine.cuda.columns.Columns.upload",
        "engine.cuda.executor.RaggedColumns.input_ids",
        "engine.model.decoder.Decoder.logits",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(broken, _raise)
            with pytest.raises(RuntimeError, match="out of memory"):
                executor.launch(batch)
    for sequence in sequences:
        sequence.block_table = array("i")
    assert OverlapDriver(executor, seed=5).generate(sequences, num_tokens=8) == expected


def _raise(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("out of memory")


def test_results_when_logits_are_not_numbers_raise_and_a_step_launched_behind_is_harmless(qwen3: Path) -> None:
    executor = load_device(qwen3)
    driver = OverlapDriver(executor)
    bad = make_sequence(make_prompt(5))
    bad.block_table.extend(range(4))
    assert isinstance(executor.kv, TorchKvStore)
    for pages in executor.kv.layers:
        for page in pages:
            page[0].fill_(float("nan"))
    bad.num_computed = 4  # the first page counts as computed
    first = executor.launch([ScheduledSequence(bad, 1, 1)])
    bad.num_computed = 5
    second = executor.launch([ScheduledSequence(bad, 1, 1, input_row=0)])
    with pytest.raises(EngineFault, match="row 0 "):
        first.results()
    with pytest.raises(EngineFault, match="row 0 "):
        second.results()
    driver.free = [block_id for block_id in driver.free if block_id > 3]
    (expected,) = Driver(load(qwen3)).generate([make_sequence(make_prompt(12))], num_tokens=9)
    assert driver.generate([make_sequence(make_prompt(12))], num_tokens=9) == [expected]


def test_load_when_no_pages_are_given_fills_the_memory_that_is_left(
    qwen3: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda.loading.kv_bytes_left", lambda step, share, graph_bytes: 100_000)
    with caplog.at_level(logging.INFO, logger="engine.cuda.loading"):
        executor = load_device(qwen3, num_blocks=None, dtype="bfloat16", max_model_len=99)
    shape = executor.kv.shape
    assert executor.kv.num_blocks == 100_000 // shape.block_bytes
    assert (executor.max_model_len, executor.vocab_size, executor.model_name) == (99, VOCAB_SIZE, "tiny")
    (record,) = [r for r in caplog.records if r.message == "device executor ready"]
    assert record.__dict__["num_kv_tokens"] == 4 * executor.kv.num_blocks
    assert record.__dict__["kv_bytes_per_token"] == shape.bytes_per_token
    sequence = make_sequence(make_prompt(90))
    OverlapDriver(executor).generate([sequence], num_tokens=8)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_launch_on_a_gpu_never_waits_for_it(qwen3: Path) -> None:
    driver = OverlapDriver(load_device(qwen3, num_blocks=512, max_running=16))
    driver.generate(sampled_sequences(10), num_tokens=3)  # kernels are compiled
    sequences = sampled_sequences(10)
    batch = []
    for sequence in sequences:
        sequence.block_table.extend(driver.free.pop() for _ in range(16))
        batch.append(ScheduledSequence(sequence, sequence.num_tokens, 1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = driver.executor.launch(batch)
        for sequence in sequences:
            sequence.num_computed = sequence.num_tokens
        second = driver.executor.launch([ScheduledSequence(s, 1, 1, input_row=i) for i, s in enumerate(sequences)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(handle.results()) for handle in (first, second)] == [10, 10]
