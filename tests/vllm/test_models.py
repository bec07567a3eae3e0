"""Models that our own decoder does not have, on tiny random checkpoints: answers are those of plain `transformers`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.checkpoints.quantizing import Rounding, quantize_checkpoint

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


def answers_of(
    model_dir: Path, prompts: list[list[int]], *, program: str = "tests.vllm.answer", dtype: str = "float32"
) -> "subprocess.CompletedProcess[str]":
    """Return what a program prints, in a process of its own: vLLM's groups are those of the first model."""
    asked = json.dumps({"model": str(model_dir), "prompts": prompts, "max_tokens": MAX_TOKENS, "dtype": dtype})
    command = [sys.executable, "-m", program]
    return subprocess.run(command, input=asked, capture_output=True, text=True, check=False, env=os.environ)


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    reference = write_tiny(tmp_path, model_type, MODELS[model_type])
    chance = random.Random(2)
    prompts = [[chance.randrange(320) for _ in range(length)] for length in (1, 31, 32, 33, 130)]
    done = answers_of(tmp_path, prompts)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer]]), logits_to_keep=MAX_TOKENS + 1).logits[0, :-1]
        assert answer == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


def test_quantized_checkpoint_has_the_answers_of_vllms_own_generate(tmp_path: Path, short_model_dir: Path) -> None:
    """4 bits in groups of 32, as `kvrelay quantize` writes them; vLLM computes such in bfloat16."""
    quantize_checkpoint(short_model_dir, tmp_path / "int4", Rounding(bits=4, group_size=32), lambda _line: None)
    chance = random.Random(3)
    prompts = [[chance.randrange(100, 40_000) for _ in range(length)] for length in (1, 31, 32, 33, 130)]
    ours, theirs = (
        answers_of(tmp_path / "int4", prompts, program=program, dtype="bfloat16")
        for program in ("tests.vllm.answer", "tests.vllm.generate")
    )
    assert ours.returncode == 0, ours.stderr[-3000:]
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    answers, expected = (json.loads(done.stdout.splitlines()[-1]) for done in (ours, theirs))
    differing = [len(p) for p, a, e in zip(prompts, answers, expected, strict=True) if a != e]
    assert len(differing) <= 1, f"prompts of {differing} tokens"  # chunks are cut elsewhere: a near tie may differ


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
    done = answers_of(tmp_path, [[1]])
    assert done.returncode != 0
    assert "UnsupportedModel" in done.stderr
    assert "MLA" in done.stderr, done.stderr[-3000:]
