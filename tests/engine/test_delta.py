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
from engine.model.floors import model_shape
from engine.model.transformers_decoder import TransformersDecoder
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore, kv_shape, windowed_layers
from engine.weights.config import UnsupportedModel, parse_config
from engine.weights.layout import layer_projections
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import DELTA, make_model, make_prompt, reference_tokens

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


@pytest.mark.parametrize("name", DELTA)
def test_models_with_heads_of_any_size_answer_as_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    prompts = [make_prompt(num, seed=num) for num in (1, 7, 40)]
    driver = Driver(load(checkpoint(name)))
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=9)
    reference = make_model(name)
    assert answers == [
        reference_tokens(reference, p, NUM_TOKENS, guess=a) for p, a in zip(prompts, answers, strict=True)
    ]


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
