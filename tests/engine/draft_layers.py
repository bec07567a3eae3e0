"""Draft layers in their published layouts, what they say in plain torch, and tiny models that draft with them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.loading import load_draft_layer
from engine.request import EngineRequest
from engine.runner import ModelExecutor
from engine.speculation.eagle import EagleDrafter
from tests.builders import make_request
from tests.engine.driver import load

EAGLE, EAGLE3, MTP = "eagle", "eagle3", "mtp"
MTP_LAYER = "model.mtp_layers.0."
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "vocab_size": 131,
}
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
"""The part of a MiMo model's config.json that a Qwen2's has not."""


def layer_tensors(
    kind: str, config: Mapping[str, Any] = CONFIG, *, model_hidden: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return random tensors of a layer by their published names; those of EAGLE-3 draft `draft_vocab_size` tokens."""
    draw = torch.Generator().manual_seed(seed)
    size, inner, is_third = config["hidden_size"], config["intermediate_size"], kind == EAGLE3
    width = size // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (size, (1 + is_third) * size),
        "self_attn.k_proj.weight": (width, (1 + is_third) * size),
        "self_attn.v_proj.weight": (width, (1 + is_third) * size),
        "self_attn.o_proj.weight": (size, size),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }
    prefix, outer = "layers.0.", {"fc.weight": (size, size + model_hidden), "fc.bias": (size,)}
    if kind == MTP:
        prefix, outer = MTP_LAYER, {}
        shapes |= {f"{name}_layernorm.weight": (size,) for name in ("token", "hidden", "input", "final")}
        shapes |= {
            f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (size, width, width), strict=True)
        }
        shapes["input_proj.weight"] = (size, 2 * model_hidden)
    elif is_third:
        prefix, outer = "midlayer.", {"fc.weight": (size, 3 * model_hidden), "norm.weight": (size,)}
        outer["lm_head.weight"] = (config["draft_vocab_size"], size)
        shapes |= {"hidden_norm.weight": (size,), "input_layernorm.weight": (size,)}
    tensors = {
        name: torch.randn(shape, generator=draw) * (1.0 if len(shape) == 1 else shape[1] ** -0.5)
        for name, shape in (outer | {prefix + name: shape for name, shape in shapes.items()}).items()
    }
    if is_third:
        vocab, drafted = config["vocab_size"], config["draft_vocab_size"]
        token_ids = torch.randperm(vocab, generator=draw)[:drafted].sort().values
        tensors["d2t"] = token_ids - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(vocab), token_ids)
    return tensors


def write_layer(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    """Write a checkpoint and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_mimo(folder: Path, qwen2: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Write the checkpoint of a MiMo model from transformers' Qwen2 and an MTP layer; return its folder."""
    qwen2.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return write_layer(folder, {**load_file(folder / "model.safetensors"), **tensors}, config | MIMO)


def reference_outputs(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], embedded: Tensor, states: Tensor, outputs: Tensor
) -> Tensor:
    """Return the layer's outputs [num_tokens, hidden]: the first tokens have the model's states, the others outputs."""
    prefixes = ("midlayer.", "layers.0.", MTP_LAYER)
    named = {name.removeprefix(next(filter(name.startswith, prefixes), "")): each for name, each in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], named[f"{name}.weight"], config["rms_norm_eps"])

    if "input_proj.weight" in named:
        before = norm(torch.cat((states, outputs)), "hidden_layernorm")
        residual = torch.cat((before, norm(embedded, "token_layernorm")), dim=-1) @ named["input_proj.weight"].T
        inputs = norm(residual, "input_layernorm")
    elif "norm.weight" in named:
        residual = torch.cat((states @ named["fc.weight"].T, outputs))
        inputs = torch.cat((norm(embedded, "input_layernorm"), norm(residual, "hidden_norm")), dim=-1)
    else:
        joined = torch.cat((embedded, torch.cat((states, outputs))), dim=-1)
        residual = inputs = joined @ named["fc.weight"].T + named["fc.bias"]
    num_heads, head_dim = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    query, key, value = (
        inputs @ named[f"self_attn.{name}_proj.weight"].T + named.get(f"self_attn.{name}_proj.bias", 0.0)
        for name in "qkv"
    )
    angles = torch.arange(len(inputs))[:, None] * config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = torch.cat((angles.cos(),) * 2, dim=-1)[:, None], torch.cat((angles.sin(),) * 2, dim=-1)[:, None]

    def turned(x: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, head_dim)
        first, second = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat((-second, first), dim=-1) * sin).transpose(0, 1)

    values = value.reshape(len(value), -1, head_dim).transpose(0, 1)
    repeats = num_heads // config["num_key_value_heads"]
    attended = F.scaled_dot_product_attention(
        turned(query), turned(key).repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0), is_causal=True
    )
    residual = residual + attended.transpose(0, 1).flatten(1) @ named["self_attn.o_proj.weight"].T
    normed = norm(residual, "post_attention_layernorm")
    gated = F.silu(normed @ named["mlp.gate_proj.weight"].T) * (normed @ named["mlp.up_proj.weight"].T)
    return residual + gated @ named["mlp.down_proj.weight"].T


def load_tiny(model_dir: Path, **options: Any) -> ModelExecutor[Any]:
    """Return an executor of a tiny model on compiled kernels; skips where there are none."""
    executor = load(model_dir, **options)
    if not executor.verifies_drafts:
        pytest.skip("no compiled kernels on this machine")
    return executor


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 6, "n": 2, "top_k": 20},
    {"frequency_penalty": 0.5},
]


def tiny_requests() -> list[EngineRequest]:
    """Return requests of all kinds to it."""
    return [
        make_request(range(i, i + 30), block_size=16, max_tokens=24, ignore_eos=True, **sampling)
        for i, sampling in enumerate(SAMPLINGS, 40)
    ]


def load_layer(
    folder: Path, executor: ModelExecutor[Any], *, kind: Literal["eagle", "mtp"] = "eagle", num_branches: int = 0
) -> EagleDrafter:
    """Return the drafter of a layer, which works for an executor."""
    return load_draft_layer(folder, executor, kind=kind, kv_bytes=1 << 20, is_coupled=True, num_branches=num_branches)
