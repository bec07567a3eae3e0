"""Both executors: greedy tokens of transformers through chunks, mixed steps and scrambled or shared pages.

The device executor runs a step ahead of what the host knows; its decoder and operations are the CPU executor's.
"""

import dataclasses
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.sampling import SamplingParams
from engine.executor import Logprobs, ScheduledSequence
from engine.pages.kv_cache import TorchKvStore
from tests.engine.driver import GREEDY, Driver, load, load_device, make_sequence
from tests.engine.tiny_models import MAX_MODEL_LEN, MODELS, make_model, make_prompt, reference_tokens

Load = Callable[..., Any]
NUM_TOKENS = 12
NUM_CHUNKED_TOKENS = 6
# Around the block size of 4: below, at and above a boundary; and the one-token prompt.
PROMPT_LENS = (1, 3, 4, 5, 23, 40)
CHUNKED = [make_prompt(num, seed=num) for num in (33, 12, 32)]
DEVICE_MODELS = (
    "gemma3",
    "granite",
    "llama",
    "llama-attention-bias",
    "mistral-window",
    "qwen2-tied",
    "qwen3-layer-types",
)


@pytest.fixture(name="load_it", params=[load, load_device], ids=["runner", "device"])
def _load_it(request: pytest.FixtureRequest) -> Load:
    found: Load = request.param
    return found


@pytest.mark.parametrize(
    ("load_it", "name"), [*((load, name) for name in MODELS), *((load_device, name) for name in DEVICE_MODELS)]
)
def test_generate_when_greedy_in_mixed_batches_equals_transformers(load_it: Load, name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    executor = load_it(tmp_path, max_model_len=MAX_MODEL_LEN)
    if executor.kv.shape.state_layers:  # so many blocks come with two states for each sequence
        executor = load_it(tmp_path, max_model_len=MAX_MODEL_LEN, num_blocks=4096)
    driver = Driver(executor)
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=7)
    found = zip(prompts, answers, strict=True)
    assert answers == [reference_tokens(reference, p, NUM_TOKENS, guess=answer) for p, answer in found]
    if load_it is load_device:
        assert driver.num_overlapped > len(prompts) * (NUM_TOKENS - 2)


@pytest.fixture(scope="module")
def whole(mixed_windows: Path) -> list[list[int]]:
    """Return the answers to CHUNKED, each computed in one piece."""
    return Driver(load(mixed_windows)).generate([make_sequence(p) for p in CHUNKED], num_tokens=NUM_CHUNKED_TOKENS)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_generate_when_chunked_any_way_answers_the_same(
    load_it: Load, mixed_windows: Path, whole: list[list[int]], block_size: int
) -> None:
    executor = load_it(mixed_windows, block_size=block_size, num_blocks=256)
    # Below, at and above a block, and the whole prompt. Each cut is at a page's end where a page is one token.
    for chunk_size in {1: (3, 1000), 4: (3, 4, 5, 1000), 16: (3, 16, 17)}[block_size]:
        sequences = [make_sequence(p, block_size=block_size) for p in CHUNKED]
        answers = Driver(executor, seed=1).generate(sequences, num_tokens=NUM_CHUNKED_TOKENS, chunk_size=chunk_size)
        assert answers == whole, f"chunks of {chunk_size}"


@pytest.mark.parametrize("num_prompt_tokens", [1, 10])
def test_step_when_prompt_has_n_samples_draws_each_with_its_own_noise(
    load_it: Load, qwen3: Path, num_prompt_tokens: int
) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=8)
    prompt = make_prompt(num_prompt_tokens)
    (result,) = Driver(load_it(qwen3)).step([(make_sequence(prompt, sampling=sampling), num_prompt_tokens)])
    token_ids = [sampled.token_id for sampled in result.sampled]
    assert len(token_ids) == 8
    assert len(set(token_ids)) > 1
    other = load(qwen3)
    for j, token_id in enumerate(token_ids):
        alone = make_sequence(prompt, sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = j
        (single,) = Driver(other).step([(alone, num_prompt_tokens)])
        assert [sampled.token_id for sampled in single.sampled] == [token_id]


def test_launch_when_batch_is_empty_returns_nothing(load_it: Load, qwen3: Path) -> None:
    assert load_it(qwen3).launch([]).results() == []


@pytest.mark.parametrize(("num_prompt_tokens", "chunk_size"), [(20, 1), (40, 7), (150, 1000)])
def test_logprobs_of_prompt_and_answer_equal_transformers(
    load_it: Load, qwen3: Path, num_prompt_tokens: int, chunk_size: int
) -> None:
    sequence = make_sequence(
        make_prompt(num_prompt_tokens), sampling=dataclasses.replace(GREEDY, num_prompt_logprobs=3, num_logprobs=1)
    )
    driver = Driver(load_it(qwen3))
    found: list[Logprobs] = []
    while sequence.num_output_tokens < 3:
        num_new = min(chunk_size, sequence.num_tokens - sequence.num_computed)
        (result,) = driver.step([(sequence, num_new)])
        found.extend(result.prompt_logprobs)
        found.extend(sampled.logprobs for sampled in result.sampled if sampled.logprobs)
    assert [entry.token_id for entry in found] == list(sequence.token_ids[1:])
    with torch.inference_mode():
        logits = make_model("qwen3")(torch.tensor([list(sequence.token_ids)])).logits[0]
    for entry, expected in zip(found, logits.log_softmax(-1)[:-1], strict=True):
        best = expected.topk(3 if len(entry.top) == 3 else 1)
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_launch_leaves_the_sequences_alone_and_results_do_not_read_them(load_it: Load, qwen3: Path) -> None:
    executor = load_it(qwen3)
    sequence = make_sequence(make_prompt(9), sampling=dataclasses.replace(GREEDY, num_prompt_logprobs=1))
    sequence.block_table.extend(range(3))
    before = (sequence.num_computed, list(sequence.token_ids), list(sequence.block_table))
    handle = executor.launch([ScheduledSequence(sequence, 9, 1)])
    assert (sequence.num_computed, list(sequence.token_ids), list(sequence.block_table)) == before
    del sequence.token_ids[:]
    sequence.block_table = array("i")
    (result,) = handle.results()
    assert (len(result.sampled), len(result.prompt_logprobs)) == (1, 8)


def test_generate_when_sampled_in_a_batch_answers_as_alone(load_it: Load, qwen3: Path) -> None:
    sampling = SamplingParams(temperature=3.0, seed=11, max_tokens=64)
    prompt = make_prompt(17)
    (alone,) = Driver(load(qwen3)).generate([make_sequence(prompt, sampling=sampling)], num_tokens=NUM_TOKENS)
    crowd = [make_sequence(make_prompt(num, seed=num)) for num in (40, 2, 9)]
    sequences = [*crowd, make_sequence(prompt, sampling=sampling)]
    assert Driver(load_it(qwen3), seed=2).generate(sequences, num_tokens=NUM_TOKENS, chunk_size=6)[-1] == alone


def test_generate_when_pages_moved_from_the_cpus_executor_answers_the_same(load_it: Load, qwen3: Path) -> None:
    source, target = load(qwen3), load_it(qwen3)
    assert source.kv.shape == target.kv.shape
    sequence = make_sequence(make_prompt(22))
    driver = Driver(source)
    driver.generate([sequence], num_tokens=5)
    (expected,) = driver.generate([sequence], num_tokens=NUM_TOKENS)
    moved = make_sequence(make_prompt(22))
    for token_id in expected[:5]:
        moved.append_token(token_id)
    moved.num_computed = 26
    moved.block_table = array("i", (9, 3, 77, 0, 5, 21, 8))
    target.kv.write_blocks(moved.block_ids(), source.kv.read_blocks(sequence.block_ids()[:7]))
    other = Driver(target)
    other.free = [block_id for block_id in other.free if block_id not in moved.block_table]
    assert other.generate([moved], num_tokens=NUM_TOKENS) == [expected]


def test_generate_when_pages_hold_nan_of_another_request_answers_the_same(load_it: Load, mixed_windows: Path) -> None:
    clean, dirty = load_it(mixed_windows), load_it(mixed_windows)
    fill_with_nan(dirty.kv)
    prompts = [make_prompt(num, seed=num) for num in (1, 6, 8, 30)]
    answers = [
        Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=5)
        for executor in (clean, dirty)
    ]
    assert answers[0] == answers[1]


def fill_with_nan(store: TorchKvStore) -> None:
    for pages in store.layers:
        for page in pages:
            page.fill_(float("nan"))
