"""Rotary frequencies against transformers, with the parameters of published checkpoints."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.config import parse_config
from engine.model.rope import RotaryEmbedding, rotate

_LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("parameters", "head_dim"),
    [
        ({"rope_type": "default", "rope_theta": 100000.0}, 64),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 128),
        (_LLAMA_31, 128),
        (_QWEN_YARN, 128),
        ({**_QWEN_YARN, "attention_factor": 0.9}, 64),
        ({**_QWEN_YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, 128),
        ({**_QWEN_YARN, "mscale": 0.707, "mscale_all_dim": 0.9}, 128),
        ({**_QWEN_YARN, "factor": 1.0}, 128),
    ],
)
def test_rotate_when_scaled_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 17, 4095, 8192, 40_000, 131_071])
    heads = torch.randn(len(positions), 6, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    query, key = apply_rotary_pos_emb(heads[None, :, :4].transpose(1, 2), heads[None, :, 4:].transpose(1, 2), cos, sin)
    expected = torch.cat((query, key), dim=1)[0].transpose(0, 1)

    ours = parse_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    rope = RotaryEmbedding(ours.rope, head_dim=head_dim, device=torch.device("cpu"))
    torch.testing.assert_close(rotate(heads, *rope.angles(positions, torch.float32)), expected, atol=2e-5, rtol=0)
