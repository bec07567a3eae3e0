"""Models that our own decoder does not have, on tiny random checkpoints: answers are those of plain `transformers`."""

import asyncio
import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.model_files import is_checkpoint
from engine.vllm.start import start_vllm
from engine.weights.config import UnsupportedModel
from engine.weights.precision import cpu_has
from tests.vllm.conftest import answers_of, first_differences, generate, handed_over, options, running_engine
from tests.vllm.gemma import WINDOW, gemma_dir

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1},
}
MAX_TOKENS = 8


def write_tiny(folder: Path, model_type: str, changes: dict[str, Any]) -> Any:
    """Write a random checkpoint and return its model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_config(AutoConfig.for_model(model_type, **_SHAPE | changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are so small that every answer repeats one token
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", MODELS)
async def test_greedy_answers_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    """Alone and handed over."""
    reference = write_tiny(tmp_path, model_type, MODELS[model_type])
    chance = random.Random(2)
    prompts = [[chance.randrange(320) for _ in range(length)] for length in (1, 31, 32, 33, 130)]
    async with running_engine(options(tmp_path, dtype="float32", max_step_tokens=50)) as engine:
        found = {
            "together": await answers_of(engine, prompts, max_tokens=MAX_TOKENS),
            "handed over": [await handed_over(engine, prompt, max_tokens=MAX_TOKENS) for prompt in prompts],
        }
    check_greedy(reference, prompts, found)


def check_greedy(reference: Any, prompts: list[list[int]], found: dict[str, list[list[int]]]) -> None:
    """Check that each token of the answers, however found, is a model's best one."""
    for prompt, *answers in zip(prompts, *found.values(), strict=True):
        assert all(answer == answers[0] for answer in answers), dict(zip(found, answers, strict=True))
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answers[0]]]), logits_to_keep=MAX_TOKENS + 1).logits[0, :-1]
        assert answers[0] == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


async def test_a_real_model_with_sliding_windows_has_the_answers_of_transformers() -> None:
    """Prompts around and beyond the window; the longest are computed in two steps."""
    if not is_checkpoint(gemma_dir()):
        pytest.skip("Gemma 3 270M is not here: `python -m tests.vllm.gemma` fetches it (240 MB, under Gemma's terms)")
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    reference = auto_model.from_pretrained(gemma_dir(), dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(gemma_dir() / "tokenizer.json"))
    text = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")).ids
    prompts = [text[17 * i : 17 * i + length] for i, length in enumerate((40, WINDOW - 1, WINDOW + 1, 600, 800))]
    told = options(gemma_dir(), dtype="float32", num_blocks=100, max_model_len=1024, max_step_tokens=600)
    async with running_engine(told) as engine:
        found = {
            "alone": [*chain(*[await answers_of(engine, [prompt], max_tokens=MAX_TOKENS) for prompt in prompts])],
            "cached": await answers_of(engine, prompts, max_tokens=MAX_TOKENS),
            "handed over": [await handed_over(engine, prompt, max_tokens=MAX_TOKENS) for prompt in prompts],
        }
    check_greedy(reference, prompts, found)


async def test_quantized_checkpoint_has_the_answers_of_vllms_own_generate(
    int4_model_dir: Path, prompts: list[list[int]]
) -> None:
    told = options(int4_model_dir, dtype="bfloat16")  # vLLM computes such a checkpoint in no other dtype
    if not cpu_has("avx512f"):  # vLLM's build for such processors has no kernel for 4-bit weights
        with pytest.raises(UnsupportedModel, match="vLLM cannot serve"):
            await asyncio.to_thread(start_vllm, told, {})
        return
    (right,) = generate([(int4_model_dir, "bfloat16")], prompts)
    async with running_engine(told) as engine:
        answers = await answers_of(engine, prompts)
        # The kernel of such weights rounds more often: half a logit has been seen.
        assert not await first_differences(engine, prompts, answers, right, near_tie=0.75)
