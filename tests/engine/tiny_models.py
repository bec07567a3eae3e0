"""Tiny randomly initialised checkpoints, and a driver that runs them through an executor as a scheduler would."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.block_hash import NO_HASHES
from common.ids import BlockId, HashRoot, RequestId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.executor import ScheduledSequence, StepResult
from engine.loading import load_executor
from engine.options import EngineOptions
from engine.runner import ModelExecutor
from engine.sequence import EngineRequest, Sequence

VOCAB_SIZE = 131
MAX_MODEL_LEN = 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
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


def _llama(**overrides: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **overrides}))


def _mistral(**overrides: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**{**_SHAPE, **overrides}))


def _qwen2(**overrides: Any) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **overrides}))


def _qwen3(**overrides: Any) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16, **_SHAPE, **overrides}))


def _windowed_layers() -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": 9}


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-multi-head": lambda: _llama(num_key_value_heads=6),
    "llama-one-key-head": lambda: _llama(num_key_value_heads=1),
    "llama-head-dim": lambda: _llama(head_dim=24),
    "llama-attention-bias": lambda: _llama(attention_bias=True),
    "llama-mlp-bias": lambda: _llama(mlp_bias=True),
    "llama-rope-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}),
    "llama-rope-dynamic": lambda: _llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}),
    "llama-rope-llama3": lambda: _llama(rope_parameters=dict(_LLAMA3)),
    "llama-rope-yarn": lambda: _llama(rope_parameters=dict(_YARN)),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral-window": lambda: _mistral(sliding_window=7),
    "mistral-window-of-two": lambda: _mistral(sliding_window=2),
    "qwen2": _qwen2,
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2-max-window-layers": lambda: _qwen2(**_windowed_layers(), max_window_layers=1),
    "qwen2-rope-yarn": lambda: _qwen2(rope_parameters={**_YARN, "attention_factor": 1.5, "truncate": False}),
    "qwen3": _qwen3,
    "qwen3-attention-bias": lambda: _qwen3(attention_bias=True),
    "qwen3-layer-types": lambda: _qwen3(
        **_windowed_layers(), layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3-rope-yarn": lambda: _qwen3(
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}
    ),
}


# Architectures that transformers computes: model_type and what differs from _SHAPE. Windows are shorter than prompts.
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 24}
_SHARED_EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 80,
}
_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
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
    "gemma3": ("gemma3_text", {**_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 12, "rope_parameters": _TWO_BASES}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**_SHARED_EXPERTS, "use_qk_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.6, "use_parallel_residual": False}),
    "granite": ("granite", _GRANITE),
    "granitemoe": ("granitemoe", {**_GRANITE, **_EXPERTS}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **_EXPERTS,
            "layer_types": ["full_attention"] * 3,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 24}),
    "helium": ("helium", {"head_dim": 10}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 10}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_EXPERTS, "head_dim": 10, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {**_EXPERTS, "head_dim": 10}),
    "ministral": ("ministral", {**_WINDOWS, "head_dim": 10}),
    "mixtral": ("mixtral", _EXPERTS),
    "mixtral-rope-dynamic": (
        "mixtral",
        {**_EXPERTS, "head_dim": 10, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}},
    ),
    "mixtral-window": ("mixtral", {**_EXPERTS, "sliding_window": 7}),
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
    "qwen2_moe": ("qwen2_moe", {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", {**_SMALL_EXPERTS, "hidden_size": 64, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {**_SMALL_EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "vaultgemma": ("vaultgemma", {**_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 12}),
}


def make_model(name: str, *, seed: int = 0) -> Any:
    """Return a float32 transformers model whose biases, norms and attention all matter."""
    if name in MODELS:
        model = MODELS[name]().eval()
    else:
        model_type, overrides = TRANSFORMERS_MODELS[name]
        config = AutoConfig.for_model(model_type, **{"pad_token_id": None, **_SHAPE, **overrides})
        auto_model: Any = AutoModelForCausalLM
        model = auto_model.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = key.endswith("norm.weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.5 * noise if parameter.ndim == 1 else 0.25 * noise)
    return model


def make_prompt(num_tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def reference_tokens(model: Any, prompt: Seq[int], num_tokens: int) -> list[int]:
    """Return transformers' greedy answer, beyond an end-of-sequence token where there is one."""
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


def load(model_dir: Path, **overrides: Any) -> ModelExecutor[Any]:
    """Return a float32 CPU executor."""
    options: dict[str, Any] = {
        "model_dir": model_dir,
        "model_name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 128,
        "kv_memory_bytes": None,
        "max_model_len": None,
    }
    executor = load_executor(EngineOptions(**{**options, **overrides}))
    assert isinstance(executor, ModelExecutor)
    return executor


def make_sequence(prompt: Seq[int], *, sampling: SamplingParams = GREEDY, block_size: int = 4) -> Sequence:
    """Return a fresh sequence without pages."""
    request = EngineRequest(
        request_id=RequestId("req-test"),
        prompt_token_ids=as_tokens(prompt),
        sampling=sampling,
        hash_root=HashRoot(bytes(32)),
        block_hashes=NO_HASHES,
    )
    return Sequence.from_request(request, block_size=block_size, order=0)


class Driver:
    """Plays the scheduler: hands out pages in a scrambled order and advances sequences step by step."""

    def __init__(self, executor: ModelExecutor[Any], *, seed: int = 0) -> None:
        self.executor = executor
        self._block_size = executor.kv.shape.block_size
        self.free = [BlockId(i) for i in range(executor.kv.num_blocks)]
        random.Random(seed).shuffle(self.free)

    def step(self, work: Seq[tuple[Sequence, int]]) -> list[StepResult]:
        """Run (sequence, number of new tokens) pairs in one step; appends the first sample's token to each sequence."""
        batch = []
        for sequence, num_new in work:
            end = sequence.num_computed + num_new
            while len(sequence.block_table) * self._block_size < end:
                sequence.block_table.append(self.free.pop())
            num_samples = sequence.num_samples if end == sequence.num_tokens else 0
            batch.append(ScheduledSequence(sequence, num_new, num_samples))
        results = self.executor.execute(batch)
        for item, result in zip(batch, results, strict=True):
            item.sequence.num_computed += item.num_new_tokens
            assert len(result.sampled) == item.num_samples
            if result.sampled:
                item.sequence.append_token(result.sampled[0].token_id)
        return results

    def generate(self, sequences: Seq[Sequence], *, num_tokens: int, chunk_size: int = 1 << 30) -> list[list[int]]:
        """Return each sequence's answer. Sequence i joins at step i, so that steps mix chunks and decode tokens."""
        num_steps = 0
        while any(s.num_output_tokens < num_tokens for s in sequences):
            num_steps += 1
            live = [s for s in sequences[:num_steps] if s.num_output_tokens < num_tokens]
            self.step([(s, min(chunk_size, s.num_tokens - s.num_computed)) for s in live])
        return [list(s.output_token_ids) for s in sequences]
