"""The device executor: graphs, rows with changing owners, faults half-way, pages in the remaining memory."""

from array import array
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from common.sampling import PARAMETERS, SamplingParams
from engine.cuda.loading import LoadedModel
from engine.executor import DeviceBroken, ScheduledSequence
from engine.pages.kv_cache import TorchKvStore
from engine.sequence import Sequence
from tests.engine.driver import DEVICE, Driver, EveryThird, load, load_device, make_sequence
from tests.engine.test_executors import fill_with_nan
from tests.engine.tiny_models import LATENT, MIXTURES, VOCAB_SIZE, make_prompt
from tests.engine.triton_interpreter import patched_once

NUM_TOKENS = 20

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
    {"structured_outputs": '{"regex": "a*"}', "temperature": 0.0},
]


# What does not change which token is chosen from given logits, or is not this executor's.
NOT_SAMPLED = {
    *("n", "seed", "max_tokens", "stop", "ignore_eos", "num_prompt_logprobs", "include_special_tokens", "detokenize"),
    *("use_beam_search", "length_penalty", "early_stopping"),
}


def sampled_sequences(num: int = len(SAMPLINGS)) -> list[Sequence]:
    return [
        make_sequence(
            make_prompt(3 + 5 * i, seed=i),
            sampling=SamplingParams(seed=i, max_tokens=64, **sampling),
            grammar=EveryThird(VOCAB_SIZE) if "structured_outputs" in sampling else None,
        )
        for i, sampling in zip(range(num), cycle(SAMPLINGS), strict=False)
    ]


def test_launch_when_rows_are_sampled_in_every_way_equals_the_other_executor(qwen3: Path) -> None:
    assert {name for each in SAMPLINGS for name in each} == {each.name for each in PARAMETERS} - NOT_SAMPLED
    expected = Driver(load(qwen3, num_blocks=512)).generate(sampled_sequences(), num_tokens=NUM_TOKENS)
    driver = Driver(load_device(qwen3, num_blocks=512, max_running=16))
    assert driver.generate(sampled_sequences(), num_tokens=NUM_TOKENS) == expected
    assert driver.num_overlapped


@pytest.mark.parametrize("max_running", [3, 8])
def test_penalised_answers_run_on_tokens_that_the_host_does_not_know_yet(qwen3: Path, max_running: int) -> None:
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.8, "temperature": 0.0},
        {"frequency_penalty": 2.0, "temperature": 0.0},
        {"presence_penalty": 2.0, "temperature": 1.5, "top_k": 8},
    ]
    sampling = [SamplingParams(seed=i, max_tokens=64, **each) for i, each in enumerate(penalties)]

    def sequences() -> list[Sequence]:
        return [make_sequence(make_prompt(4 + i), sampling=each) for i, each in enumerate(sampling)]

    expected = Driver(load(qwen3)).generate(sequences(), num_tokens=NUM_TOKENS)
    driver = Driver(load_device(qwen3, max_running=max_running))
    for _ in range(3):  # rows of the counts change hands
        assert driver.generate(sequences(), num_tokens=NUM_TOKENS) == expected
    assert driver.num_overlapped == 3 * 3 * (NUM_TOKENS - 1)


@pytest.mark.parametrize("max_graph_seqs", [1, 3, 8])
def test_launch_when_batch_exceeds_the_largest_graph_answers_the_same(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, max_graph_seqs: int
) -> None:
    expected = Driver(load(qwen3)).generate(sampled_sequences(5), num_tokens=NUM_TOKENS)
    monkeypatch.setattr("engine.cuda.loading._MAX_GRAPH_SEQS", max_graph_seqs)
    assert Driver(load_device(qwen3)).generate(sampled_sequences(5), num_tokens=NUM_TOKENS) == expected


def test_launch_when_rows_change_hands_and_pages_are_taken_answers_the_same(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sequences share three rows, and return with other pages, or with the same pages in another order."""
    monkeypatch.setattr("engine.cuda.loading.MAX_N", 3)
    prompts = [make_prompt(num, seed=num) for num in (9, 14, 5, 22, 17, 8, 11)]
    expected = Driver(load(qwen3)).generate([make_sequence(p) for p in prompts], num_tokens=12)
    driver = Driver(load_device(qwen3, max_running=3), seed=3)
    sequences = [make_sequence(p) for p in prompts]
    for num_tokens in (3, 4, 7, 12):
        for first in range(0, len(sequences), 3):
            driver.generate(sequences[first : first + 3], num_tokens=num_tokens)
            if num_tokens != 4:
                for sequence in sequences[first : first + 3]:
                    driver.preempt(sequence)
    assert [list(s.output_token_ids) for s in sequences] == expected


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
        "engine.device.columns.PackedColumns.upload",
        "engine.cuda.executor.RaggedColumns.input_ids",
        "engine.model.decoder.Decoder.logits",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(broken, _raise)
            with pytest.raises(RuntimeError, match="out of memory"):
                executor.launch(batch)
    for sequence in sequences:
        sequence.block_table = array("i")
    assert Driver(executor, seed=5).generate(sequences, num_tokens=8) == expected


def _raise(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("is_tried", [True, False])
def test_step_whose_late_choice_never_came_is_waited_for_and_harmless(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, is_tried: bool
) -> None:
    executor = load_device(qwen3)
    (structured,) = sequences = sampled_sequences()[-1:]
    (expected,) = Driver(load(qwen3)).generate(sampled_sequences()[-1:], num_tokens=8)
    structured.block_table.extend(range(30))
    first = executor.launch([ScheduledSequence(structured, structured.num_tokens, 1)])
    structured.num_computed = structured.num_tokens
    second = executor.launch([ScheduledSequence(structured, 1, 1, input_row=0)])
    (result,) = first.results()
    assert result.sampled[0].token_id == expected[0]
    if is_tried:
        structured.append_token(expected[0])
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr("engine.device.columns.PackedColumns.upload", _raise)
            second.choose()
    assert [each.sampled for each in second.results()] == [[]]
    structured.block_table, structured.num_computed = array("i"), 0
    assert Driver(executor, seed=5).generate(sequences, num_tokens=8) == [expected]


ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")
NO_MEMORY = RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("place", ["graphs.DecodeGraphs.run", "executor.fetch_logprobs"])
@pytest.mark.parametrize(("error", "expected"), [(ILLEGAL, DeviceBroken), (NO_MEMORY, RuntimeError)])
def test_launch_when_cuda_fails_says_whether_the_device_is_broken(
    qwen3: Path, error: Exception, expected: type[Exception], place: str
) -> None:
    executor = load_device(qwen3)
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1 if "logprobs" in place else None)
    sequence = make_sequence(make_prompt(5), sampling=sampling)
    sequence.block_table.extend(range(2))
    num_new = 1 if "graphs" in place else 5
    sequence.num_computed = 5 - num_new
    with mock.patch(f"engine.cuda.{place}", side_effect=error), pytest.raises(expected, match="CUDA error"):
        executor.launch([ScheduledSequence(sequence, num_new, 1)])


def test_failed_launch_whose_device_cannot_be_waited_for_proves_it_broken(qwen3: Path) -> None:
    executor, sequence = load_device(qwen3), make_sequence(make_prompt(5))
    sequence.block_table.extend(range(2))
    with (
        mock.patch("engine.model.decoder.Decoder.logits", side_effect=RuntimeError("Triton Error [CUDA]")),
        mock.patch("engine.device.devices.HostDevice.synchronize", side_effect=ILLEGAL),
        pytest.raises(DeviceBroken, match="illegal"),
    ):
        executor.launch([ScheduledSequence(sequence, 5, 1)])


def test_results_that_cannot_be_copied_prove_the_device_broken(qwen3: Path) -> None:
    executor, sequence = load_device(qwen3), make_sequence(make_prompt(5))
    sequence.block_table.extend(range(2))
    with mock.patch("engine.device.devices.HostDevice.fetch", return_value=mock.Mock(side_effect=ILLEGAL)):
        handle = executor.launch([ScheduledSequence(sequence, 5, 1)])
    with pytest.raises(DeviceBroken, match="illegal"):
        handle.results()


def test_results_when_logits_are_nan_say_so_and_the_next_step_in_flight_is_harmless(qwen3: Path) -> None:
    executor = load_device(qwen3)
    driver = Driver(executor)
    bad = make_sequence(make_prompt(5))
    bad.block_table.extend(range(4))
    assert isinstance(executor.kv, TorchKvStore)
    for pages in executor.kv.layers:
        for page in pages:
            page[0].fill_(float("nan"))
    bad.num_computed = 4  # the first page counts as computed
    good = make_sequence(make_prompt(12))
    good.block_table.extend(range(4, 9))
    first = executor.launch([ScheduledSequence(bad, 1, 1), ScheduledSequence(good, 12, 1)])
    bad.num_computed, good.num_computed = 5, 12
    second = executor.launch([ScheduledSequence(s, 1, 1, input_row=row) for row, s in enumerate((bad, good))])
    results = [first.results(), second.results()]
    assert [[result.has_failed for result in each] for each in results] == [[True, False]] * 2
    driver.free = [block_id for block_id in driver.free if block_id > 8]
    (expected,) = Driver(load(qwen3)).generate([make_sequence(make_prompt(12))], num_tokens=9)
    assert [each[1].sampled[0].token_id for each in results] == expected[:2]
    assert driver.generate([make_sequence(make_prompt(12))], num_tokens=9) == [expected]


def test_load_when_no_pages_are_given_fills_the_memory_that_is_left(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda.loading.kv_bytes_left", lambda step, share, graph_bytes: 100_000)
    executor = load_device(qwen3, num_blocks=None, dtype="bfloat16", max_model_len=99)
    shape = executor.kv.shape
    assert executor.kv.num_blocks == 100_000 // shape.block_bytes
    assert (executor.max_model_len, executor.vocab_size, executor.model_name) == (99, VOCAB_SIZE, "tiny")
    sequence = make_sequence(make_prompt(90))
    Driver(executor).generate([sequence], num_tokens=8)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_launch_on_a_gpu_never_waits_for_it(name: str, checkpoint: Callable[[str], Path]) -> None:
    driver = Driver(load_device(checkpoint(name), dtype="bfloat16", num_blocks=512, max_running=16))
    driver.generate(sampled_sequences(), num_tokens=3)  # kernels are compiled
    sequences = sampled_sequences()
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
        for sequence, result in zip(sequences, first.results(), strict=True):
            sequence.append_token(result.sampled[0].token_id)
        second.choose()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(result.sampled) for result in second.results()] == [1] * len(SAMPLINGS)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the executor over Triton's kernels: on a GPU by graphs, else in the interpreter."""
    pytest.importorskip("triton")
    from engine.ops.triton_kernels.ops import TritonOps

    def make_ops(model: LoadedModel, store: TorchKvStore) -> TritonOps:
        return TritonOps(model.decoder.config, store, max_positions=model.info.max_model_len)

    monkeypatch.setattr("engine.cuda.loading.make_device_ops", make_ops)
    with patched_once():
        yield


@pytest.mark.parametrize("name", [*MIXTURES, *LATENT, "llama4"])
def test_launch_of_mixtures_and_latent_attention_equals_the_other_executor(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    prompts = [make_prompt(num, seed=num) for num in (5, 17, 30)]
    folder = checkpoint(name)
    expected = Driver(load(folder)).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS)
    driver = Driver(load_device(folder), seed=3)
    assert driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=7) == expected
    assert driver.num_overlapped


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_launch_over_kernels_and_pages_full_of_nan_equals_the_other_executor(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    prompts = [make_prompt(num, seed=num) for num in (9, 4, 6)]
    expected = Driver(load(folder)).generate([make_sequence(p) for p in prompts], num_tokens=3)
    executor = load_device(folder, max_running=2, num_blocks=16)
    assert isinstance(executor.kv, TorchKvStore)
    fill_with_nan(executor.kv)
    driver = Driver(executor)
    assert driver.generate([make_sequence(p) for p in prompts], num_tokens=3, chunk_size=7) == expected
    assert driver.num_overlapped >= 5
