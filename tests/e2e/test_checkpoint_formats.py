"""Weights and pages of every format, served over prefill and decode workers.

The rules: with the same kernels, an answer is that of one engine alone, token for token, handed over and from a cache.
Beside transformers with the weights as the format's own specification dequantizes them, in float32, each token is the
most likely one, or as likely within what rounding inputs to 8 bits changes: a few hundredths of the logits' deviation.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.executor import Executor
from engine.loading import load_executor
from engine.options import EngineOptions
from tests.builders import BLOCK_SIZE
from tests.e2e.in_process import running_system
from tests.engine.checkpoints.models import save_quantized
from tests.engine.checkpoints.packers import compressed_config, pack_awq, pack_compressed, pack_gptq
from tests.engine.driver import Driver, make_sequence
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

pytestmark = [pytest.mark.usefixtures("rates_measured_once"), pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_TOKENS = 16
NEAR_TIE = 0.1
"""Deviations of the logits."""


def save_gguf(folder: Path) -> Any:
    pytest.importorskip("gguf", reason="reading GGUF needs the `gguf` extra")
    from tests.engine.checkpoints import gguf_models

    types = {"q_proj": "Q4_0", "k_proj": "Q8_0", "v_proj": "Q5_1", "o_proj": "Q4_1", "down_proj": "Q4_1"}
    return gguf_models.save_gguf(folder, types)


def save_compressed(folder: Path) -> Any:
    return save_quantized(
        folder, compressed_config(symmetric=False), lambda grid: pack_compressed(grid, symmetric=False)
    )


def save_gptq(folder: Path) -> Any:
    return save_quantized(folder, {"quant_method": "gptq", "bits": 4, "group_size": 32}, pack_gptq)


def save_awq(folder: Path) -> Any:
    return save_quantized(folder, {"quant_method": "awq", "bits": 4, "group_size": 32}, pack_awq)


Answers = tuple[list[tuple[int, ...]], list[list[int]]]
"""Prompts and their answers."""


async def assert_over_two_pools_as_alone(folder: Path, *, block_size: int = BLOCK_SIZE, **formats: Any) -> Answers:
    """Return prompts and their answers by one engine, which must be those of two, handed over and from a cache."""
    options = EngineOptions(
        model_dir=folder,
        model_name="tiny",
        dtype="float32",
        device="cpu",
        block_size=block_size,
        num_blocks=128,
        **formats,
    )

    def load() -> Executor:
        return load_executor(options)

    prompts = [make_prompt(num_tokens, seed=num_tokens) for num_tokens in (3, BLOCK_SIZE, 5 * BLOCK_SIZE + 1, 100)]
    alone = Driver(load()).generate(
        [make_sequence(prompt, block_size=block_size) for prompt in prompts], num_tokens=NUM_TOKENS
    )
    async with running_system(load=load, router={"local_prefill_max_tokens": 0}) as system, system.client() as client:
        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        handed_over = await asyncio.gather(*(client.generate(prompt, **asked) for prompt in prompts))
        cached = await asyncio.gather(*(client.generate(prompt, **asked) for prompt in prompts))
        await system.until_idle()
    assert [list(answer.token_ids) for answer in handed_over] == alone
    assert [list(answer.token_ids) for answer in cached] == alone
    assert handed_over[3].transfer.num_blocks > 0
    assert cached[3].usage.num_cached_tokens > 0
    return prompts, alone


@pytest.mark.parametrize("save", [save_compressed, save_gptq, save_awq, save_gguf])
async def test_checkpoint_over_two_pools_answers_like_one_engine_and_its_values(
    tmp_path: Path, save: Callable[[Path], Any]
) -> None:
    model = save(tmp_path)
    prompts, answers = await assert_over_two_pools_as_alone(tmp_path)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_likely(model, prompt, answer)


async def test_weights_in_4_bits_over_pages_in_8_bits_answer_like_one_engine(tmp_path: Path) -> None:
    make_model("qwen3-layer-types", hidden_size=192, head_dim=32).save_pretrained(tmp_path)
    await assert_over_two_pools_as_alone(tmp_path, block_size=16, quantization="int4", kv_dtype="int8")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next"])
async def test_latent_rows_sinks_and_states_over_two_pools_answer_as_transformers(tmp_path: Path, name: str) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    prompts, answers = await assert_over_two_pools_as_alone(tmp_path)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_tokens(reference, prompt, NUM_TOKENS, guess=answer)


async def test_weights_in_4_bits_over_latent_rows_in_8_bits_answer_like_one_engine(tmp_path: Path) -> None:
    make_model("deepseek_v3", hidden_size=192).save_pretrained(tmp_path)
    await assert_over_two_pools_as_alone(tmp_path, block_size=16, quantization="int4", kv_dtype="int8")


async def test_weights_in_4_bits_beside_states_answer_like_one_engine(tmp_path: Path) -> None:
    make_model("qwen3_next", hidden_size=192, head_dim=32, linear_key_head_dim=16).save_pretrained(tmp_path)
    await assert_over_two_pools_as_alone(tmp_path, block_size=16, quantization="int4", kv_dtype="int8")


@torch.inference_mode()
def assert_likely(model: Any, prompt: tuple[int, ...], answer: list[int]) -> None:
    """Fail unless every token is transformers' most likely one, or nearly so."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
    distance = (logits.amax(1) - chosen) / logits.std(1)
    assert float(distance.max()) < NEAR_TIE, distance
