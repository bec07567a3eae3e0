"""Tiny GGUF files, beside plain models of the same values. Needs the package `gguf`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.engine.checkpoints.models import SIZES
from tests.engine.tiny_models import make_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, layer_idx, part = module.split(".", 3)
    return f"blk.{layer_idx}.{NAMES[part]}.{kind}"


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows of queries or keys as llama.cpp's converter orders them for the architecture "llama"."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def save_gguf(
    folder: Path,
    types: Mapping[str, str],
    *,
    name: str = "llama-attention-bias",
    architecture: str = "llama",
    frequencies: bool = False,
) -> Any:
    """Save a tiny model as GGUF with the types of these parts, others in F32; returns the model of the same values."""
    model = make_model(name, **SIZES)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    heads = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            module, _, kind = key.rpartition(".")
            part = module.rpartition(".")[2]
            kind_name = types.get(part, "F32") if kind == "weight" else "F32"
            qtype = gguf.GGMLQuantizationType[kind_name]
            values = parameter.numpy()
            if architecture == "llama" and part in heads:
                values = permuted(values, heads[part])
            stored = gguf.quants.quantize(values, qtype)
            rounded = gguf.quants.dequantize(stored, qtype).astype(np.float32).reshape(values.shape)
            writer.add_tensor(gguf_name(key), stored, raw_dtype=qtype)
            if architecture == "llama" and part in heads:
                halves = rounded.reshape(heads[part], -1, 2, *values.shape[1:])
                rounded = halves.swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(rounded.copy()))
    if frequencies:
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    described = {**config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(described, default=str))
    return model
