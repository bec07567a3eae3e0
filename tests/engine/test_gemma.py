"""Gemma 3 by every way on which answers may come about, on torch's kernels and on compiled ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from common.model_files import is_checkpoint
from engine.model.loader import load_weights, weight_files
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.runner import ModelExecutor
from engine.weights.config import parse_config, read_json
from tests.builders import BLOCK_SIZE, core_on, make_request, served
from tests.engine.driver import GREEDY, Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens
from tests.vllm.gemma import WINDOW, gemma_dir

# Windows are 7 and 2 tokens, longer and shorter than a block. Heads are of a size that the compiled kernels take.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 32},
    "gemma3-every-third": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
}
NUM_TOKENS = 12
LICENSE = Path(__file__).parents[2] / "LICENSE"
PROMPT_LENS = (1, *(num_blocks * BLOCK_SIZE + off for num_blocks in (1, 2, 5) for off in (-1, 0, 1)))


@pytest.fixture(scope="module", params=MODELS)
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_model(request.param, hidden_size=96, **MODELS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


Load = Callable[..., ModelExecutor[Any]]


@pytest.fixture(name="load_it", params=["auto", "torch"])
def _load_it(request: pytest.FixtureRequest, gemma: tuple[Any, Path]) -> Load:
    return lambda **options: load(gemma[1], kernels=request.param, **options)


def test_answers_alone_and_in_a_batch_are_those_of_transformers(gemma: tuple[Any, Path], load_it: Load) -> None:
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    executor = load_it()
    alone = [Driver(executor).generate([make_sequence(p)], num_tokens=NUM_TOKENS)[0] for p in prompts]
    together = Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS)
    found = zip(prompts, alone, strict=True)
    assert alone == together == [reference_tokens(gemma[0], p, NUM_TOKENS, guess=a) for p, a in found]


def test_answers_are_the_same_whatever_the_chunks_of_a_prompt(load_it: Load) -> None:
    prompt, driver = make_prompt(5 * BLOCK_SIZE + 1), Driver(load_it(num_blocks=512))
    whole, *chunked = (
        driver.generate([make_sequence(prompt)], num_tokens=NUM_TOKENS, chunk_size=chunk_size)[0]
        for chunk_size in range(len(prompt), 0, -1)
    )
    assert all(answer == whole for answer in chunked)


def test_answers_are_transformers_cached_preempted_and_resumed_anywhere(gemma: tuple[Any, Path], load_it: Load) -> None:
    executor = load_it(num_blocks=20)
    assert executor.exact_resume
    assert_answers_are_those_of_transformers(gemma[0], executor, num_tokens=NUM_TOKENS)


def test_greedy_samples_of_one_prompt_are_all_those_of_transformers(gemma: tuple[Any, Path], load_it: Load) -> None:
    prompt = make_prompt(5 * BLOCK_SIZE + 1)
    collector = served(core_on(load_it()), make_request(prompt, max_tokens=NUM_TOKENS, n=3))
    answers = [collector.token_ids(sample_index) for sample_index in range(3)]
    assert answers == [reference_tokens(gemma[0], prompt, NUM_TOKENS, guess=answers[0])] * 3


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bfloat16_stays_near_float32(gemma: tuple[Any, Path], kernels: str) -> None:
    sampling = replace(GREEDY, num_prompt_logprobs=1)
    prompt = make_prompt(5 * BLOCK_SIZE + 1)
    exact, half = (
        [
            entry.logprob
            for entry in Driver(load(gemma[1], kernels=kernels, dtype=dtype))
            .step([(make_sequence(prompt, sampling=sampling), len(prompt))])[0]
            .prompt_logprobs
        ]
        for dtype in ("float32", "bfloat16")
    )
    assert abs(fmean(half) - fmean(exact)) < 0.05 * pstdev(exact)
    assert fmean(abs(a - b) for a, b in zip(half, exact, strict=True)) < 0.1 * pstdev(exact)


def test_bfloat16_norms_and_embeddings_have_the_bits_of_transformers(tmp_path: Path) -> None:
    reference = make_model("gemma3").bfloat16()
    reference.save_pretrained(tmp_path)
    config = parse_config(read_json(tmp_path / "config.json"))
    weights = load_weights(weight_files(tmp_path), config, dtype=torch.bfloat16, device=torch.device("cpu"))
    shape = kv_shape(config, block_size=4, dtype=torch.bfloat16, fingerprint="")
    span = SequenceSpan(num_computed=0, num_new_tokens=1, block_table=[0])
    ops = TorchOps(config, TorchKvStore(shape, 1, device=torch.device("cpu")))
    step = ops.plan(AttentionMetadata.from_spans([span], block_size=4))
    token_ids = torch.arange(100)
    with torch.inference_mode():
        embedded = weights.embed(token_ids)
        assert torch.equal(embedded, reference.model.embed_tokens(token_ids))
        normed = reference.model.layers[0].pre_feedforward_layernorm(embedded)
        assert torch.equal(step.rms_norm(embedded, weights.layers[0].post_attention_norm), normed)


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.skipif(not is_checkpoint(gemma_dir()), reason="`python -m tests.vllm.gemma` fetches the model")
def test_the_real_gemma_answers_as_transformers_around_and_beyond_its_windows() -> None:
    auto_model: Any = transformers.AutoModelForCausalLM
    reference = auto_model.from_pretrained(gemma_dir(), dtype=torch.float32).eval()
    text = Tokenizer.from_file(str(gemma_dir() / "tokenizer.json")).encode(LICENSE.read_text(encoding="utf-8")).ids
    prompts = [text[:num_tokens] for num_tokens in (WINDOW - 1, WINDOW + 1, 800)]
    driver = Driver(load(gemma_dir(), block_size=16, num_blocks=256, max_model_len=1024))
    whole, chunked = (
        driver.generate(
            [make_sequence(prompt, block_size=16) for prompt in prompts], num_tokens=NUM_TOKENS, chunk_size=chunk_size
        )
        for chunk_size in (1024, 300)
    )
    assert whole == chunked
    for prompt, answer in zip(prompts, whole, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert answer == logits.argmax(-1).tolist()
