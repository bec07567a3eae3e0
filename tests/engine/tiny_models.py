"""Tiny randomly initialised checkpoints, and a driver that runs them through an executor as a scheduler would."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.ids import BlockHash, BlockId, RequestId
from common.sampling import SamplingParams
from engine.executor import ScheduledSequence, StepResult
from engine.runner import ModelExecutor, load_executor
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


def make_model(name: str, *, seed: int = 0) -> Any:
    """Return a float32 transformers model whose biases, norms and attention all matter."""
    model = MODELS[name]().eval()
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


def load(model_dir: Path, **overrides: Any) -> ModelExecutor:
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
    return load_executor(**{**options, **overrides})


def make_sequence(prompt: Seq[int], *, sampling: SamplingParams = GREEDY, block_size: int = 4) -> Sequence:
    """Return a fresh sequence without pages."""
    request = EngineRequest(
        request_id=RequestId("req-test"),
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        hash_root=BlockHash(bytes(16)),
        block_hashes=(),
    )
    return Sequence.from_request(request, block_size=block_size, order=0)


class Driver:
    """Plays the scheduler: hands out pages in a scrambled order and advances sequences step by step."""

    def __init__(self, executor: ModelExecutor, *, seed: int = 0) -> None:
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
