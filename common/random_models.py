"""Checkpoint folders without weights, for machines that reach no hub: published shapes, filled with random numbers.

`model.id: random:qwen3-8b` (or `random:qwen3-8b:7`, with a seed) names one. Its folder holds an ordinary config.json, a
generated tokenizer, and in place of tensors a file with the seed from which `engine.weights.random_weights` makes them.
Code that reads checkpoints reads this one too. Answers are gibberish at the speed of the real model.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.own_files import publish

RANDOM_PREFIX = "random:"
SEED_FILE = "random_weights.json"
"""Takes the place of model.safetensors."""

_FORMAT = 1  # raised whenever the same seed would give other weights or another tokenizer
_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT: Mapping[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10_000_000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
_LLAMA_31: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
_DEEPSEEK: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_DEEPSEEK_YARN: Mapping[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# A larger spread than published: with two layers of 0.02 every token would be about as probable as every other.
_TINY: Mapping[str, Any] = {
    "bos_token_id": 510,
    "eos_token_id": 511,
    "hidden_size": 128,
    "initializer_range": 0.15,
    "intermediate_size": 192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
    "vocab_size": 512,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    # Its layers, and a quarter of their number, with an eighth of its experts.
    "qwen3-next-small": {**_QWEN3_NEXT, "num_experts": 64, "num_hidden_layers": 12},
    "llama-3.1-8b": {
        **_LLAMA_31,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": _DEEPSEEK_YARN,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 201088,
    },
    "tiny": {**_QWEN3, **_TINY, "head_dim": 64, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "tiny-llama": {
        **_LLAMA_31,
        **_TINY,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_scaling": {**_LLAMA_31["rope_scaling"], "original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
    },
    "tiny-moe": {
        **_QWEN3_MOE,
        **_TINY,
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
    "tiny-qwen3-next": {
        **_QWEN3_NEXT,
        **_TINY,
        "full_attention_interval": 2,
        "head_dim": 64,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 96,
    },
    "tiny-deepseek": {
        **_DEEPSEEK,
        **_TINY,
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 64,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rope_scaling": {
            **_DEEPSEEK_YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    },
    "tiny-granite4": {
        **_TINY,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.03125,
        "embedding_multiplier": 4.0,
        "hidden_act": "silu",
        "intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
        "logits_scaling": 2.0,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "model_type": "granitemoehybrid",
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.5,
        "rms_norm_eps": 1e-5,
        "shared_intermediate_size": 128,
        "tie_word_embeddings": True,
        "use_cache": True,
    },
}
"""config.json of each name; tiny ones for tests, a small one for one machine, the others as their makers published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """Everything that determines the weights: equal values give equal weights on every machine."""

    name: str
    """A key of `CONFIGS`."""
    seed: int = 0
    format: int = _FORMAT

    @classmethod
    def parse(cls, model_id: str) -> "RandomModel":
        """Read `random:<name>[:<seed>]`. Raises ValueError naming what is wrong."""
        name, _, seed = model_id.removeprefix(RANDOM_PREFIX).partition(":")
        if name not in CONFIGS:
            raise ValueError(f"there is no random model {name!r}; there are {', '.join(CONFIGS)}")
        if seed and not (seed.isascii() and seed.isdecimal()):
            raise ValueError(f"{model_id!r}: the seed is {seed!r}, not a number")
        return cls(name=name, seed=int(seed or 0))

    @classmethod
    def read(cls, path: Path) -> "RandomModel":
        """Read a `SEED_FILE`. Raises ValueError for a file of another version or of another program."""
        try:
            model = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not describe random weights: {error}") from error
        if model.format != _FORMAT or model.name not in CONFIGS:
            raise ValueError(f"{path} is of another version: remove the folder")
        return model


def ensure_random_checkpoint(model_id: str, parent: Path) -> Path:
    """Return the folder of a random model inside `parent`; creates it when it is missing.

    The folder appears complete or not at all, even when several processes create it. Raises ValueError for an unknown
    name.
    """
    model = RandomModel.parse(model_id)
    folder = parent / f"random-{model.name}-{model.seed}-v{model.format}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        _write(model, made)
        try:
            publish(made, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same content
                raise
    return folder


def _write(model: RandomModel, folder: Path) -> None:
    from common.fake_tokenizer import generated_tokenizer  # imports the tokenizer library, which only this needs

    config = CONFIGS[model.name]
    for name, content in (("config.json", config), (SEED_FILE, asdict(model))):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    generated_tokenizer(config["vocab_size"], eos_token_id=config["eos_token_id"]).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:",
        encoding="utf-8",
    )
