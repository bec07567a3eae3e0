"""Tiny randomly initialised checkpoints of every architecture, and transformers' answers."""

import copy
import random
from collections.abc import Sequence as Seq
from typing import Any

import torch
import transformers

VOCAB_SIZE = 131
MAX_MODEL_LEN = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_GEMMA3: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 12, "rope_parameters": _TWO_BASES}


_WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 24}
# model_type and what differs from _SHAPE: mixtures of experts, other architectures of our own decoder, and those that
# transformers computes.
_SINKS: dict[str, Any] = {**_EXPERTS, "sliding_window": 7, "rope_parameters": {**_YARN, "truncate": False}}
_CHUNKS: dict[str, Any] = {
    "head_dim": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": 7,
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "floor_scale": 9,
    "attn_scale": 0.7,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_GRANITE4 = {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 40, "mamba_n_heads": 4}
_MAMBA: dict[str, Any] = {
    **_GRANITE4,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 6,
    "mamba_d_state": 12,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", {**_GRANITE, **_EXPERTS}),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 24}),
    "gpt_oss": ("gpt_oss", {**_SINKS, "head_dim": 10}),
    "mixtral": ("mixtral", _EXPERTS),
    "mixtral-rope-dynamic": (
        "mixtral",
        {**_EXPERTS, "head_dim": 10, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}},
    ),
    "mixtral-window": ("mixtral", {**_EXPERTS, "sliding_window": 7}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 80, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", {**_SMALL_EXPERTS, "hidden_size": 64, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {**_SMALL_EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    "qwen3_moe-window": ("qwen3_moe", {**_SMALL_EXPERTS, **_WINDOWED, "head_dim": 16, "decoder_sparse_step": 2}),
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LATENT_YARN = {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v2-query-rank": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "attention_bias": True,
            "rope_parameters": _LATENT_YARN,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "rope_parameters": _LATENT_YARN,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**_LATENT, "rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}
# Heads of sizes that no kernel takes; two value heads share a key head.
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
_DELTA_EXPERTS = {**_DELTA, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 40}
DELTA: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", _DELTA_EXPERTS),
    "qwen3_next-dense-layer": (
        "qwen3_next",
        {**_DELTA_EXPERTS, "mlp_only_layers": [1], "attention_bias": True, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5": ("qwen3_5_text", {**_DELTA, "linear_num_value_heads": 2}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA_EXPERTS),
}
MAMBA: dict[str, tuple[str, dict[str, Any]]] = {
    "granite4": ("granitemoehybrid", _MAMBA),
    "granite4-attention": (
        "granitemoehybrid",
        {**_GRANITE4, "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    ),
    "granite4-dense": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "layer_types": ["attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_expand": 1,
            "time_step_limit": [0.5, 1.0],
        },
    ),
}
_NEMOTRON = {"head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 12, "n_groups": 2}
NEMOTRON: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "nemotron_h",
        {**_NEMOTRON, "hybrid_override_pattern": "M-MM*-*M-", "mlp_bias": True, "use_bias": True},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "MEM*EM-",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **MAMBA,
    **NEMOTRON,
    **MIXTURES,
    **LATENT,
    **DELTA,
    "llama4": ("llama4_text", _CHUNKS),
    "llama4-bias": (
        "llama4_text",
        {
            **_CHUNKS,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "no_rope_layers": [0, 1],
            "rope_parameters": _LLAMA3,
        },
    ),
    "qwen2_moe-window": ("qwen2_moe", {**_SMALL_EXPERTS, **_WINDOWED, "shared_expert_intermediate_size": 24}),
    "gemma3": (
        "gemma3_text",
        {**_GEMMA3, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3-every-third": (
        "gemma3_text",
        {**_GEMMA3, "sliding_window": 2, "num_hidden_layers": 3, "sliding_window_pattern": 3, "rope_parameters": None},
    ),
    "granite": ("granite", {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}}),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-max-window-layers": ("qwen2", {**_WINDOWED, "max_window_layers": 1}),
    "qwen2-rope-yarn": ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.5, "truncate": False}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {**_WINDOWED, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3-rope-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        },
    ),
}

# Windows are shorter than prompts.
_SHARED_EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SHARED_KEYS: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 80,
}
TRANSFORMERS_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {**_SMALL_EXPERTS, **_WINDOWS, "num_dense_layers": 1}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.3}),
    "dots1": ("dots1", _SHARED_EXPERTS),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "ernie4_5_moe": ("ernie4_5_moe", {**_SMALL_EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "exaone4": ("exaone4", _WINDOWS),
    "flex_olmo": ("flex_olmo", _EXPERTS),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **_WINDOWS,
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **_SHARED_KEYS,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": ("gemma4_text", {**_SHARED_KEYS, "global_head_dim": 16}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**_SHARED_EXPERTS, "hidden_size": 64, "head_dim": 16, "use_qk_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.6, "use_parallel_residual": False}),
    "helium": ("helium", {"head_dim": 10}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 10}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_EXPERTS, "head_dim": 10, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {**_EXPERTS, "head_dim": 10}),
    "ministral": ("ministral", {**_WINDOWS, "head_dim": 10}),
    "nanochat": ("nanochat", {}),
    "olmo": ("olmo", {"clip_qkv": 0.8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWS),
    "olmoe": ("olmoe", _EXPERTS),
    "phi": ("phi", {"partial_rotary_factor": 0.6, "qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 80}),
    "phimoe": ("phimoe", _EXPERTS),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "vaultgemma": ("vaultgemma", {**_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 12}),
}


def make_model(name: str, *, seed: int = 0, **sizes: Any) -> Any:
    """Return a float32 transformers model whose biases, norms and attention all matter."""
    model_type, overrides = (MODELS | TRANSFORMERS_MODELS)[name]
    config = transformers.AutoConfig.for_model(
        model_type, **{"pad_token_id": None, **_SHAPE, **copy.deepcopy(overrides), **sizes}
    )
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *_score_biases(model)):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = key.endswith("norm.weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.5 * noise if parameter.ndim == 1 else 0.25 * noise)
    return model


def _score_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]


def make_prompt(num_tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def reference_tokens(model: Any, prompt: Seq[int], num_tokens: int, *, guess: Seq[int] = ()) -> list[int]:
    """Return transformers' greedy answer, which an end-of-sequence token does not end.

    A right guess saves time. It is the greedy answer if each token is the likeliest one after those before it, and one
    pass over all tokens shows that.
    """
    if len(guess) == num_tokens and _likeliest_tokens(model, [*prompt, *guess[:-1]])[-num_tokens:] == list(guess):
        return list(guess)
    prompt_ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return list(output[0, len(prompt) :].tolist())


def _likeliest_tokens(model: Any, token_ids: Seq[int]) -> list[int]:
    """Return the likeliest next token behind each token."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return list(logits.argmax(-1).tolist())
