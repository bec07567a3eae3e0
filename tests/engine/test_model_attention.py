"""Attention, rotary frequencies and whole prompts of our decoder, against naive attention and against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.ids import BlockId
from engine.kv_store import KvShape
from engine.model.decoder import Decoder
from engine.model.loader import load_weights, weight_files
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_attention import TorchPagedAttention
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import for_length, parse_config, read_json
from engine.weights.rope import RotaryEmbedding, inverse_frequencies, rotate
from engine.window import Window
from tests.engine.tiny_models import make_prompt

BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8


def make_store(num_blocks: int) -> TorchKvStore:
    shape = KvShape(
        num_layers=1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype="float32",
        row_bytes=4 * HEAD_DIM,
        fingerprint="test",
    )
    return TorchKvStore(shape, num_blocks, device=torch.device("cpu"))


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, first_position: int, window: Window | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention of query [n, heads, dim] at first_position.., by a loop over queries.

    key and value are [context, kv_heads, dim].
    """
    key, value = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (key, value))
    rows = []
    for i, row in enumerate(query):
        end = first_position + i + 1
        begin = 0
        if window is not None:
            begin = (end - 1) // window.num_tokens * window.num_tokens if window.is_chunk else end - window.num_tokens
            begin = max(0, begin)
        scores = torch.einsum("hd,khd->hk", row, key[begin:end]) / HEAD_DIM**0.5
        powers = scores.exp()
        weights = powers / (powers.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None]))
        rows.append(torch.einsum("hk,khd->hd", weights, value[begin:end]))
    return torch.stack(rows)


def check_step(spans: list[tuple[int, int]], window: Window | None, seed: int, *, has_sinks: bool = False) -> None:
    """Run one step over (num_computed, num_new_tokens) sequences in scrambled pages and compare every token."""
    torch.manual_seed(seed)
    num_blocks = sum(-(-(computed + new) // BLOCK_SIZE) for computed, new in spans)
    store = make_store(num_blocks + 1)
    free = [BlockId(i) for i in range(num_blocks + 1)]
    random.Random(seed).shuffle(free)
    store.layers[0][0].normal_(std=100)  # old content of pages must not matter
    store.layers[0][1].normal_(std=100)
    attention = TorchPagedAttention(store, [window])
    keys = [torch.randn(computed + new, NUM_KV_HEADS, HEAD_DIM) for computed, new in spans]
    values = [torch.randn_like(key) for key in keys]
    query = torch.randn(sum(new for _, new in spans), NUM_HEADS, HEAD_DIM)
    sinks = 2 * torch.randn(NUM_HEADS) if has_sinks else None
    tables = [[free.pop() for _ in range(-(-(computed + new) // BLOCK_SIZE))] for computed, new in spans]

    def run(parts: list[tuple[int, int]], query: Tensor) -> Tensor:
        described = [
            SequenceSpan(num_computed=a, num_new_tokens=b - a, block_table=table)
            for (a, b), table in zip(parts, tables, strict=True)
            if b > a
        ]
        key, value = (torch.cat([x[a:b] for (a, b), x in zip(parts, source, strict=True)]) for source in (keys, values))
        plan = attention.plan(AttentionMetadata.from_spans(described, block_size=BLOCK_SIZE))
        return plan.attend(0, query, key, value, sinks)

    computed_before = [(0, computed) for computed, _ in spans]
    if any(computed for computed, _ in spans):
        run(computed_before, torch.zeros(sum(computed for computed, _ in spans), NUM_HEADS, HEAD_DIM))
    output = run([(computed, computed + new) for computed, new in spans], query)

    start = 0
    for (computed, new), key, value in zip(spans, keys, values, strict=True):
        expected = naive_attention(query[start : start + new], key, value, computed, window, sinks)
        torch.testing.assert_close(output[start : start + new], expected, atol=1e-5, rtol=1e-5)
        start += new


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 21), st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9])), min_size=1, max_size=6),
    window=st.none() | st.builds(Window, num_tokens=st.integers(1, 12), is_chunk=st.booleans()),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attend_when_batch_mixes_chunks_and_decodes_equals_naive(
    spans: list[tuple[int, int]], window: Window | None, has_sinks: bool, seed: int
) -> None:
    check_step(spans, window, seed, has_sinks=has_sinks)


@pytest.mark.parametrize("is_chunk", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 600, 5000])
def test_attend_when_decode_lengths_differ_widely_equals_naive(num_tokens: int, is_chunk: bool) -> None:
    window = Window(num_tokens=num_tokens, is_chunk=is_chunk)
    check_step([(1300, 1), (0, 1), (700, 1), (699, 1), (3, 1), (20, 3), (1299, 1)], window, seed=1)


def test_plan_when_lengths_differ_widely_bounds_padding() -> None:
    tables = [[BlockId(i) for i in range(-(-n // BLOCK_SIZE))] for n in (4000, 10, 11, 12, 3900)]
    spans = [
        SequenceSpan(num_computed=num - 1, num_new_tokens=1, block_table=table)
        for num, table in zip((4000, 10, 11, 12, 3900), tables, strict=True)
    ]
    metadata = AttentionMetadata.from_spans(spans, block_size=BLOCK_SIZE)
    plan = TorchPagedAttention(make_store(1000), [None]).plan(metadata)
    sizes = [(len(group.rows), group.num_keys) for group in plan.layer_plans[0].groups]
    assert sizes == [(2, 4000), (3, 12)]


_LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("parameters", "head_dim"),
    [
        ({"rope_type": "default", "rope_theta": 100000.0}, 64),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 128),
        (_LLAMA_31, 128),
        (_QWEN_YARN, 128),
        ({**_QWEN_YARN, "attention_factor": 0.9}, 64),
        ({**_QWEN_YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}, 128),
        ({**_QWEN_YARN, "mscale": 0.707, "mscale_all_dim": 0.9}, 128),
        ({**_QWEN_YARN, "factor": 1.0}, 128),
    ],
)
def test_rotate_when_scaled_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 17, 4095, 8192, 40_000, 131_071])
    heads = torch.randn(len(positions), 6, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    query, key = apply_rotary_pos_emb(heads[None, :, :4].transpose(1, 2), heads[None, :, 4:].transpose(1, 2), cos, sin)
    expected = torch.cat((query, key), dim=1)[0].transpose(0, 1)

    ours = parse_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    rope = RotaryEmbedding(ours.rope, head_dim=head_dim, device=torch.device("cpu"))
    torch.testing.assert_close(rotate(heads, *rope.angles(positions, torch.float32)), expected, atol=2e-5, rtol=0)


def test_dynamic_frequencies_are_those_of_the_longest_text() -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(num_attention_heads=32, max_position_embeddings=2048, rope_parameters=parameters)
    ours = parse_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert ours.max_position_embeddings == 8192
    assert for_length(ours, 2048) == ours
    theirs = LlamaRotaryEmbedding(config)
    theirs(torch.zeros(1), torch.tensor([[8191]]))
    torch.testing.assert_close(inverse_frequencies(for_length(ours, 8192).rope, 128), theirs.inv_freq)


CPU = torch.device("cpu")
PROMPT = make_prompt(45)


def prompt_logits(model_dir: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return our logits [num_tokens, vocab_size] of PROMPT in one chunk."""
    config = parse_config(read_json(model_dir / "config.json"))
    model = Decoder(config, load_weights(weight_files(model_dir), config, dtype=dtype, device=CPU))
    shape = kv_shape(config, block_size=4, dtype=dtype, fingerprint="test")
    store = TorchKvStore(shape, 12, device=CPU)
    span = SequenceSpan(
        num_computed=0, num_new_tokens=len(PROMPT), block_table=[BlockId(i) for i in reversed(range(12))]
    )
    metadata = AttentionMetadata.from_spans([span], block_size=4)
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(PROMPT), TorchOps(config, store).plan(metadata)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_when_half_precision_stays_near_float32(dtype: torch.dtype, qwen3: Path) -> None:
    exact, half = prompt_logits(qwen3), prompt_logits(qwen3, dtype)
    assert half.dtype is torch.float32
    assert (half - exact).abs().mean() < 0.05 * exact.std()
