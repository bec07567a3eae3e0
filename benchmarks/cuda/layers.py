"""First layers of a model of the real sizes, with random weights: small enough to be compared and timed by itself."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cuda.arms import BLOCK_SIZE
from benchmarks.shapes import shortened
from common.random_models import CONFIGS
from engine.model.decoder import Decoder
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import plain_format
from engine.weights.config import DecoderConfig, parse_config
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.layout import allocate_weights, checkpoint_views, complete_norms
from engine.weights.random_weights import fill_random, initializer_range

VOCAB_SIZE = 1024
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-70b": {
        **CONFIGS["llama-3.1-8b"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    **CONFIGS,
}
"""config.json of each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Some layers between a small embedding and its head."""

    config: DecoderConfig
    weights: DecoderWeights

    @classmethod
    def of(cls, model: str, *, dtype: torch.dtype, device: torch.device) -> "Layers":
        """Return the layers of `short_config`."""
        config = short_config(model)
        weights = allocate_weights(config, dtype=dtype, device=device, stacks_experts=True)
        made = cls(config=config, weights=weights)
        fill_random(checkpoint_views(made.weights, config), seed=0, std=initializer_range(MODELS[model]))
        complete_norms(made.weights, config)
        return made

    def widened(self, device: torch.device) -> "Layers":
        """Return a copy in float32, with each expert by itself."""
        copy = Layers(config=self.config, weights=allocate_weights(self.config, dtype=torch.float32, device=device))
        sources = checkpoint_views(self.weights, self.config)
        for name, tensor in checkpoint_views(copy.weights, self.config).items():
            tensor.copy_(sources[name])
        complete_norms(copy.weights, self.config)
        return copy

    @property
    def decoder(self) -> Decoder:
        """The decoder with these weights."""
        return Decoder(self.config, self.weights)

    def step_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads, where routers choose evenly."""
        experts = self.config.experts
        share = 1 - (1 - experts.num_chosen / experts.num_experts) ** num_tokens if experts else 1.0
        return sum(
            tensor.nbytes * (share if ".experts." in name else 1)
            for name, tensor in checkpoint_views(self.weights, self.config).items()
            if ".layers." in name
        )


def short_config(model: str) -> DecoderConfig:
    """Return the shape of a model's first layer, or of two where experts begin behind it."""
    num_layers = 1 + int(MODELS[model].get("first_k_dense_replace", 0))
    return parse_config({**shortened(dict(MODELS[model]), num_layers), "vocab_size": VOCAB_SIZE})


def scattered_step(spans: Sequence[tuple[int, int]]) -> AttentionMetadata:
    """Describe sequences, each (tokens computed before, new tokens), whose pages lie scattered."""
    sizes = [-(-(computed + new) // BLOCK_SIZE) for computed, new in spans]
    ids = random.Random(0).sample(range(sum(sizes) + 1), sum(sizes))
    tables = [[ids.pop() for _ in range(size)] for size in sizes]
    return AttentionMetadata.from_spans(
        [
            SequenceSpan(num_computed=computed, num_new_tokens=new, block_table=table)
            for (computed, new), table in zip(spans, tables, strict=True)
        ],
        block_size=BLOCK_SIZE,
    )


def noisy_store(
    config: DecoderConfig,
    metadata: AttentionMetadata,
    num_filled: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> TorchKvStore:
    """Return pages of `dtype` for a step: noise for the first `num_filled` tokens of each sequence, NaN elsewhere."""
    num_blocks = 1 + max(max(span.block_table) for span in metadata.spans)
    shape = kv_shape(config, block_size=BLOCK_SIZE, dtype=dtype, fingerprint="benchmark", kv_dtype=plain_format(dtype))
    store = TorchKvStore(shape, num_blocks, device=device, is_like_device=True)
    slots = torch.cat([_slots(span, filled) for span, filled in zip(metadata.spans, num_filled, strict=True)]).to(
        device
    )
    for pages in (pages for layer in store.layers for pages in layer):
        rows = torch.full((num_blocks * BLOCK_SIZE, *pages.shape[2:]), float("nan"), device=device)
        rows[slots] = torch.randn((len(slots), *pages.shape[2:]), device=device)
        pages.copy_(rows.view(pages.shape))
    return store


def _slots(span: SequenceSpan, num_tokens: int) -> torch.Tensor:
    at = torch.arange(num_tokens)
    return torch.tensor(span.block_table)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
