"""Latent attention: DeepSeek's answers by every way on which they may come about, and the bytes of its pages."""

import dataclasses
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ids import BlockId
from common.random_models import CONFIGS
from common.sampling import SamplingParams
from engine.model.decoder import Decoder
from engine.model.loader import load_weights, weight_files
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import KvDtype
from engine.weights.config import DecoderConfig, for_length, parse_config, read_json
from engine.weights.quantize import QuantizationMethod
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import LATENT, MAX_MODEL_LEN, make_model, make_prompt

CPU = torch.device("cpu")
NUM_TOKENS = 10
PROMPT = make_prompt(45)


def answers(folder: Path, *prompts: tuple[int, ...], chunk_size: int = 1 << 30, **options: Any) -> list[list[int]]:
    driver = Driver(load(folder, **options))
    return driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=chunk_size)


def logits(folder: Path, *, dtype: torch.dtype, chunk_size: int, kv_dtype: KvDtype = "auto") -> torch.Tensor:
    """Return the logits [num_tokens, vocab_size] of PROMPT."""
    config = for_length(parse_config(read_json(folder / "config.json")), MAX_MODEL_LEN)
    decoder = Decoder(config, load_weights(weight_files(folder), config, dtype=dtype, device=CPU))
    shape = kv_shape(config, block_size=16, dtype=dtype, kv_dtype=kv_dtype, fingerprint="test")
    ops = TorchOps(config, TorchKvStore(shape, 4, device=CPU), dtype)
    parts = []
    for begin in range(0, len(PROMPT), chunk_size):
        tokens = PROMPT[begin : begin + chunk_size]
        table = [BlockId(i) for i in (2, 0, 3)]
        span = SequenceSpan(num_computed=begin, num_new_tokens=len(tokens), block_table=table)
        step = ops.plan(AttentionMetadata.from_spans([span], block_size=16))
        with torch.inference_mode():
            parts.append(decoder.logits(decoder.forward(torch.tensor(tokens), step)))
    return torch.cat(parts)


# Below and above the number of queries from which heads get keys and values of their own.
@pytest.mark.parametrize("chunk_size", [1, 7, 20, 45])
@pytest.mark.parametrize("name", LATENT)
def test_logits_are_those_of_transformers_however_a_prompt_is_cut(
    name: str, chunk_size: int, checkpoint: Callable[[str], Path]
) -> None:
    with torch.inference_mode():
        expected = make_model(name)(torch.tensor([PROMPT])).logits[0]
    found = logits(checkpoint(name), dtype=torch.float32, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 45])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_rounded_numbers_and_pages_stay_near_the_exact_ones(kv_dtype: KvDtype, chunk_size: int, tmp_path: Path) -> None:
    make_model("deepseek_v3", kv_lora_rank=28).save_pretrained(tmp_path)  # rows of 32, which int4 takes
    exact = logits(tmp_path, dtype=torch.float32, chunk_size=45)
    found = logits(tmp_path, dtype=torch.bfloat16, chunk_size=chunk_size, kv_dtype=kv_dtype)
    assert (found - exact).abs().mean() < {"auto": 0.05, "int8": 0.05, "int4": 0.4}[kv_dtype] * exact.std()


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17])
def test_answer_is_the_same_for_chunks_of_every_size(num_prompt_tokens: int, checkpoint: Callable[[str], Path]) -> None:
    prompt, other = make_prompt(num_prompt_tokens), make_prompt(9, seed=1)
    folder = checkpoint("deepseek_v3")
    whole = answers(folder, prompt, other)
    assert whole == [answers(folder, each)[0] for each in (prompt, other)]
    for chunk_size in range(1, num_prompt_tokens):
        assert answers(folder, prompt, other, chunk_size=chunk_size) == whole


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_answers_are_transformers_cached_preempted_and_resumed_anywhere(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    executor = load(checkpoint(name), num_blocks=20)
    assert executor.exact_resume
    assert_answers_are_those_of_transformers(make_model(name), executor, num_tokens=NUM_TOKENS)


def test_samples_of_one_prompt_have_their_own_noise(checkpoint: Callable[[str], Path]) -> None:
    sampling = SamplingParams(temperature=5.0, seed=7, n=8)
    driver = Driver(load(checkpoint("deepseek_v3")))
    (result,) = driver.step([(make_sequence(PROMPT, sampling=sampling), len(PROMPT))])
    token_ids = [sampled.token_id for sampled in result.sampled]
    assert len(set(token_ids)) > 1
    for j, token_id in enumerate(token_ids):
        alone = make_sequence(PROMPT, sampling=dataclasses.replace(sampling, n=1))
        alone.sample_index = j
        (single,) = driver.step([(alone, len(PROMPT))])
        assert [sampled.token_id for sampled in single.sampled] == [token_id]


@pytest.mark.parametrize("num_computed", [3, 4, 5, 26])
def test_answer_goes_on_from_the_pages_of_another_engine(num_computed: int, checkpoint: Callable[[str], Path]) -> None:
    """What a decode worker does with the blocks of a prefill worker."""
    folder = checkpoint("deepseek_v3")
    source, target = load(folder), load(folder)
    sequence = make_sequence(PROMPT[:22])
    [expected] = Driver(source).generate([sequence], num_tokens=NUM_TOKENS)
    moved = make_sequence(PROMPT[:22])
    for token_id in expected[: max(0, num_computed - 21)]:
        moved.append_token(token_id)
    moved.num_computed, num_blocks = num_computed, -(-num_computed // 4)
    moved.block_table = array("i", (9, 3, 77, 0, 5, 21, 8)[:num_blocks])
    target.kv.write_blocks(moved.block_ids(), source.kv.read_blocks(sequence.block_ids()[:num_blocks]))
    other = Driver(target)
    other.free = [block_id for block_id in other.free if block_id not in moved.block_table]
    assert other.generate([moved], num_tokens=NUM_TOKENS) == [expected]


def test_pages_that_hold_nan_of_another_request_change_nothing(checkpoint: Callable[[str], Path]) -> None:
    dirty = load(checkpoint("deepseek_v3"))
    assert isinstance(dirty.kv, TorchKvStore)
    for (rows,) in dirty.kv.layers:
        rows.fill_(float("nan"))
    prompts = [make_prompt(num, seed=num) for num in (1, 6, 30)]
    found = Driver(dirty).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=5)
    assert found == answers(checkpoint("deepseek_v3"), *prompts, chunk_size=5)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rounded_weights_answer_the_same_alone_and_in_a_batch(
    method: QuantizationMethod, checkpoint: Callable[[str], Path]
) -> None:
    prompts = [make_prompt(num, seed=num) for num in (1, 6, 30)]
    together = answers(checkpoint("deepseek_v3"), *prompts, quantization=method)
    assert together == [answers(checkpoint("deepseek_v3"), prompt, quantization=method)[0] for prompt in prompts]


def test_page_of_deepseek_v2_lite_has_576_values_for_a_token_and_layer() -> None:
    config = parse_config(CONFIGS["deepseek-v2-lite"])
    shape = kv_shape(config, block_size=16, dtype=torch.bfloat16, fingerprint="test")
    assert shape.bytes_per_token == 2 * 576 * config.num_layers
    assert shape.block_bytes == 16 * shape.bytes_per_token
    assert full_attention_bytes(config) / shape.bytes_per_token == pytest.approx(8.9, abs=0.1)


def full_attention_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    assert config.latent is not None
    return 2 * config.num_layers * config.num_heads * (config.latent.query_dim + config.latent.value_dim)
