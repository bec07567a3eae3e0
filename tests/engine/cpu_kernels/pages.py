"""Random batches on pages, for the compiled kernels and their references."""

import random
from array import array
from dataclasses import replace

import torch
from hypothesis import strategies as st

from engine.ops.metadata import SequenceSpan
from engine.ops.torch_pages import layer_pages
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import KvDtype
from engine.weights.config import DecoderConfig, parse_config
from engine.window import Window

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def make_config(num_heads: int, num_kv_heads: int, head_dim: int, window: Window | None) -> DecoderConfig:
    """Return the shape of a model of one layer."""
    config = parse_config(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 16,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 4096,
        }
    )
    return replace(config, windows=(window,))


def make_store(
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    kv_dtype: KvDtype = "auto",
    block_size: int = 16,
    num_blocks: int = NUM_BLOCKS,
) -> TorchKvStore:
    """Return pages that hold the same random keys and values in all slots each time."""
    shape = kv_shape(config, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, fingerprint="test")
    store = TorchKvStore(shape, num_blocks, device=CPU)
    torch.manual_seed(3)
    slots = torch.arange(num_blocks * block_size)
    for pages in layer_pages(store, 0, dtype):
        pages.write(slots, torch.randn(len(slots), shape.num_kv_heads, shape.head_dim).to(dtype))
    return store


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


def windows_of(*sizes: int) -> st.SearchStrategy[Window | None]:
    """Return a strategy for windows of these sizes, which slide or are chunks, and for none."""
    return st.none() | st.builds(Window, num_tokens=st.sampled_from(sizes), is_chunk=st.booleans())


lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130]), st.sampled_from([1, 1, 1, 2, 31, 64, 70])),
    min_size=1,
    max_size=4,
)
