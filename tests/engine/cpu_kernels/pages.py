"""Random batches on pages, for the compiled kernels and their references."""

import random
from array import array

import torch
from hypothesis import strategies as st

from engine.kv_cache import TorchKvStore, kv_shape
from engine.model.config import DecoderConfig, parse_config
from engine.ops.metadata import SequenceSpan

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def make_config(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> DecoderConfig:
    """Return the shape of a model of one layer."""
    return parse_config(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 16,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "sliding_window": window,
            "max_position_embeddings": 4096,
        }
    )


def make_store(
    config: DecoderConfig, block_size: int, dtype: torch.dtype, num_blocks: int = NUM_BLOCKS
) -> TorchKvStore:
    """Return empty pages."""
    shape = kv_shape(config, block_size=block_size, dtype=dtype, fingerprint="test")
    return TorchKvStore(shape, num_blocks, device=CPU)


def make_qkv(config: DecoderConfig, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return queries, keys and values of new tokens."""
    return torch.randn(num_tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim).to(dtype)


def spans_for(lengths: list[tuple[int, int]], block_size: int, num_blocks: int = NUM_BLOCKS) -> list[SequenceSpan]:
    """Return spans of (num_computed, num_new_tokens) on shuffled, separate pages."""
    free = list(range(num_blocks))
    random.Random(7).shuffle(free)
    spans = []
    for num_computed, num_new in lengths:
        table = array("i", [free.pop() for _ in range(-(-(num_computed + num_new) // block_size))])
        spans.append(SequenceSpan(num_computed=num_computed, num_new_tokens=num_new, block_table=table))
    return spans


lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130]), st.sampled_from([1, 1, 1, 2, 31, 64, 70])),
    min_size=1,
    max_size=4,
)
