"""Mamba-2 layers on our decoder: Granite 4, and Nemotron-H, whose layers are a mixer or an MLP each.

Answers are those of transformers, on the compiled kernels (where there is a compiler) and on torch's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from common.sampling import SamplingParams
from engine.model.transformers_decoder import TransformersDecoder
from engine.pages.kv_cache import TorchKvStore
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

NUM_TOKENS = 8
BLOCK_SIZE = 4
PROMPTS = [make_prompt(num, seed=num) for num in (3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1)]

# Heads that the kernels take.
_GRANITE4 = {"hidden_size": 192, "mamba_d_state": 16}
_NEMOTRON = {"hidden_size": 64, "head_dim": 32, "mamba_head_dim": 16, "ssm_state_size": 32}
SIZES: dict[str, dict[str, Any]] = {
    "granite4": _GRANITE4,
    "granite4-dense": _GRANITE4,
    "nemotron_h": _NEMOTRON,
    "nemotron_h-experts": _NEMOTRON,
}


@pytest.fixture(scope="module", params=SIZES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model and its checkpoint."""
    model = make_model(request.param, **SIZES[request.param])
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


def test_each_of_n_samples_is_the_one_that_it_is_alone(saved: tuple[Any, Path]) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=4)
    executor = load(saved[1])
    (result,) = Driver(executor).step([(make_sequence(PROMPTS[0], sampling=sampling), len(PROMPTS[0]))])
    for sample_index, sampled in enumerate(result.sampled):
        alone = make_sequence(PROMPTS[0], sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = sample_index
        (single,) = Driver(executor, seed=2).step([(alone, len(PROMPTS[0]))])
        assert [each.token_id for each in single.sampled] == [sampled.token_id]
