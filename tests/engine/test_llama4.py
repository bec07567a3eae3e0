"""Llama 4 on our decoder, whose texts cross several chunks of attention, on torch's kernels and on compiled ones."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.sampling import SamplingParams
from engine.kv_store import has_windows
from engine.model.transformers_decoder import TransformersDecoder
from engine.runner import ModelExecutor
from engine.weights.config import UnsupportedModel
from engine.window import Window
from tests.builders import BLOCK_SIZE, core_on, make_request, served
from tests.engine.drafting import GuessingDrafter, eager
from tests.engine.driver import GREEDY, Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

NUM_TOKENS = 12
# Shorter than a block, a block, and longer: answers cross their ends, too. Heads are of a size that the kernels take.
CHUNKS = (BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1)
PROMPT_LENS = (1, *(num_blocks * BLOCK_SIZE + off for num_blocks in (1, 2, 5) for off in (-1, 0, 1)))


@pytest.fixture(scope="module", params=CHUNKS)
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_model("llama4", hidden_size=96, head_dim=32, attention_chunk_size=request.param)
    folder = tmp_path_factory.mktemp("llama4")
    model.save_pretrained(folder)
    return model, folder


Load = Callable[..., ModelExecutor[Any]]


@pytest.fixture(name="load_it", params=["auto", "torch"])
def _load_it(request: pytest.FixtureRequest, llama: tuple[Any, Path]) -> Load:
    return lambda **options: load(llama[1], kernels=request.param, **options)


def test_layers_with_chunks_have_pages_of_their_own(llama: tuple[Any, Path]) -> None:
    executor = load(llama[1])
    assert not isinstance(executor.model, TransformersDecoder)
    assert has_windows(executor.kv)
    windowed = executor.kv.shape.windowed
    assert windowed is not None
    assert windowed.layers == (0,)
    assert windowed.window == Window(num_tokens=llama[0].config.attention_chunk_size, is_chunk=True)


def test_answers_alone_and_in_a_batch_are_those_of_transformers(llama: tuple[Any, Path], load_it: Load) -> None:
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    executor = load_it()
    alone = [Driver(executor).generate([make_sequence(p)], num_tokens=NUM_TOKENS)[0] for p in prompts]
    together = Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS)
    found = zip(prompts, alone, strict=True)
    assert alone == together == [reference_tokens(llama[0], p, NUM_TOKENS, guess=a) for p, a in found]


def test_answers_are_the_same_whatever_the_chunks_of_a_prompt(load_it: Load) -> None:
    prompt, driver = make_prompt(5 * BLOCK_SIZE + 1), Driver(load_it(num_blocks=512))
    whole, *chunked = (
        driver.generate([make_sequence(prompt)], num_tokens=NUM_TOKENS, chunk_size=chunk_size)[0]
        for chunk_size in range(len(prompt), 0, -1)
    )
    assert all(answer == whole for answer in chunked)


def test_answers_are_transformers_cached_preempted_and_resumed_anywhere(llama: tuple[Any, Path], load_it: Load) -> None:
    executor = load_it(num_blocks=20)
    assert executor.exact_resume
    assert_answers_are_those_of_transformers(llama[0], executor, num_tokens=NUM_TOKENS)


def test_greedy_samples_of_one_prompt_are_all_those_of_transformers(llama: tuple[Any, Path], load_it: Load) -> None:
    prompt = make_prompt(5 * BLOCK_SIZE + 1)
    collector = served(core_on(load_it()), make_request(prompt, max_tokens=NUM_TOKENS, n=3))
    answers = [collector.token_ids(sample_index) for sample_index in range(3)]
    assert answers == [reference_tokens(llama[0], prompt, NUM_TOKENS, guess=answers[0])] * 3


def test_each_of_n_samples_is_the_one_that_it_is_alone(load_it: Load) -> None:
    sampling, prompt = SamplingParams(temperature=5.0, seed=7, n=4), make_prompt(9)
    executor = load_it()
    (result,) = Driver(executor).step([(make_sequence(prompt, sampling=sampling), len(prompt))])
    for sample_index, sampled in enumerate(result.sampled):
        alone = make_sequence(prompt, sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = sample_index
        (single,) = Driver(executor, seed=2).step([(alone, len(prompt))])
        assert [each.token_id for each in single.sampled] == [sampled.token_id]


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_answers_with_drafts_across_chunks_are_those_without(llama: tuple[Any, Path], rate: float) -> None:
    executor = load(llama[1])
    if not executor.verifies_drafts:
        pytest.skip("no compiled kernels on this machine")
    request = make_request(make_prompt(5 * BLOCK_SIZE - 2), max_tokens=4 * BLOCK_SIZE, ignore_eos=True)
    plain = served(core_on(executor), request).outputs
    answer = [output.token_id for output in plain]
    core = core_on(executor, speculator=eager(GuessingDrafter(lambda _sequence: answer, rate=rate)))
    assert served(core, request).outputs == plain
    assert core.load().num_accepted_tokens > BLOCK_SIZE


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bfloat16_and_int8_weights_stay_near_float32(llama: tuple[Any, Path], kernels: str) -> None:
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=1)
    prompt = make_prompt(5 * BLOCK_SIZE + 1)
    exact, half, rounded = (
        [
            entry.logprob
            for entry in Driver(load(llama[1], kernels=kernels, **options))
            .step([(make_sequence(prompt, sampling=sampling), len(prompt))])[0]
            .prompt_logprobs
        ]
        for options in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"})
    )
    for found in (half, rounded):
        assert fmean(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.2 * pstdev(exact)


def test_language_model_of_a_multimodal_checkpoint_answers_as_it_does_alone(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    alone, text_config = llama[0], llama[0].config
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes = {
        "image_size": 4,
        "patch_size": 2,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
    }
    config = transformers.Llama4Config(text_config=text_config.to_dict(), vision_config={**vision, **sizes})
    whole = transformers.Llama4ForConditionalGeneration(config)
    whole.language_model.load_state_dict(alone.state_dict())
    whole.save_pretrained(tmp_path)
    assert any(name.startswith("vision_model.") for name in load_file(tmp_path / "model.safetensors"))
    executor, prompt = load(tmp_path), make_prompt(3 * BLOCK_SIZE)
    (answer,) = Driver(executor).generate([make_sequence(prompt)], num_tokens=NUM_TOKENS)
    assert answer == reference_tokens(alone, prompt, NUM_TOKENS, guess=answer)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_rows_of_queries_that_are_no_whole_heads_are_refused_by_name(
    llama: tuple[Any, Path], tmp_path: Path, name: str
) -> None:
    tensors = load_file(llama[1] / "model.safetensors")
    key = f"model.layers.0.self_attn.{name}.weight"
    save_file(tensors | {key: torch.zeros(40, 96)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama[1] / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=f"{name} has 40 rows, no multiple of head_dim 32"):
        load(tmp_path)
