"""Models that our own decoder does not have, on tiny random checkpoints: answers are those of plain `transformers`."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import load_executor
from engine.model.config import UnsupportedModel
from engine.model.precision import cpu_has
from tests.vllm.conftest import answers_of, core_of, first_differences, generate, options

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


@pytest.fixture(autouse=True)
def new_groups() -> None:
    """Let vLLM make its process groups anew: those of the first model of a process have none for experts."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    reference = write_tiny(tmp_path, model_type, MODELS[model_type])
    chance = random.Random(2)
    prompts = [[chance.randrange(320) for _ in range(length)] for length in (1, 31, 32, 33, 130)]
    core = core_of(load_executor(options(tmp_path, dtype="float32")), max_step_tokens=50)
    answers = answers_of(core, prompts, max_tokens=MAX_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer]]), logits_to_keep=MAX_TOKENS + 1).logits[0, :-1]
        assert answer == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


def test_quantized_checkpoint_has_the_answers_of_vllms_own_generate(
    int4_model_dir: Path, prompts: list[list[int]]
) -> None:
    told = options(int4_model_dir, dtype="bfloat16")  # vLLM computes such a checkpoint in no other dtype
    if not cpu_has("avx512f"):  # vLLM's build for such processors has no kernel for 4-bit weights
        with pytest.raises(UnsupportedModel, match="vLLM cannot compute"):
            load_executor(told)
        return
    core = core_of(load_executor(told), max_step_tokens=50)
    answers = answers_of(core, prompts)
    (right,) = generate([(int4_model_dir, "bfloat16")], prompts)
    # The kernel of such weights rounds more often: half a logit has been seen.
    assert not first_differences(core.executor, prompts, answers, right, near_tie=0.75)


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    shape = {
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": 32,
        "n_routed_experts": 4,
        "first_k_dense_replace": 2,
    }
    write_tiny(tmp_path, "deepseek_v2", shape)
    with pytest.raises(UnsupportedModel, match="MLA"):
        load_executor(options(tmp_path, dtype="float32"))
