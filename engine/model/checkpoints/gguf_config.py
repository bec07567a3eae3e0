"""The configuration that a GGUF file states, in the words of config.json, for folders that have none."""

from pathlib import Path
from typing import Any

import numpy as np

from engine.model.checkpoints.gguf_file import field_value, open_header
from engine.weights.config import UnsupportedModel

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_UNTOLD = "rope_freqs.weight"


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return what a config.json would say of the model in a file. Raises UnsupportedModel, naming what needs one."""
    reader = open_header(path)
    tensors = {each.name: each for each in reader.tensors}

    def value(key: str) -> Any:
        content = field_value(reader, key)
        # The shortest number that rounds to the float32: what config.json says, such as 1e-06.
        return float(str(np.float32(content))) if isinstance(content, float) else content

    architecture = value("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{path.name}: general.architecture: {architecture!r} is not supported; supported are"
            f" {', '.join(_ARCHITECTURES)}"
        )
    scaling = value(f"{architecture}.rope.scaling.type")
    if _UNTOLD in tensors or scaling not in (None, "none"):
        raise UnsupportedModel(
            f"{path.name} stretches rotary frequencies ({scaling or _UNTOLD}), and does not say how in full; put the"
            " model's config.json beside it"
        )
    stated = {name: value(f"{architecture}.{key}") for key, name in _KEYS.items()}
    embedding = tensors.get("token_embd.weight")
    return {
        **{name: found for name, found in stated.items() if found is not None},
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": None if embedding is None else int(embedding.shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
    }
