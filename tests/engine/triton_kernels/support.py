"""Paged batches for kernels and their references."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.device.interpreter import is_interpreted
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.step import DeviceStep

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative tolerance: about two units in the last place of a kernel's result."""
_NUM_PARTS = 5
"""Parts of a block; a layer has the second and the third."""
_TRUNCATION = 3
"""Factor for the interpreter, which truncates to bfloat16, and rounds three times in a norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch of sequences, given as (tokens computed before, new tokens)."""

    spans: Seq[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    has_sinks: bool = False
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(num_new for _, num_new in self.spans)

    def metadata(self) -> AttentionMetadata:
        """Describe the step; blocks are scrambled over more pages than it needs."""
        blocks = list(range(self._num_blocks))
        random.Random(self.seed).shuffle(blocks)
        spans = [
            SequenceSpan(
                num_computed=num_computed,
                num_new_tokens=num_new,
                block_table=[blocks.pop() for _ in range(-(-(num_computed + num_new) // self.block_size))],
            )
            for num_computed, num_new in self.spans
        ]
        return AttentionMetadata.from_spans(spans, block_size=self.block_size)

    def step(self, device: torch.device, *, tile_tokens: int = 1) -> DeviceStep:
        return DeviceStep.from_metadata(self.metadata(), tile_tokens=tile_tokens, device=device)

    def query(self, device: torch.device) -> Tensor:
        return self._random(self.num_tokens, self.num_heads, self.head_dim).to(device, self.dtype)

    def qkv(self, device: torch.device) -> Tensor:
        num_all_heads = self.num_heads + 2 * self.num_kv_heads
        return self._random(self.num_tokens, num_all_heads, self.head_dim).to(device, self.dtype)

    def sinks(self, device: torch.device) -> Tensor | None:
        return 2 * self._random(self.num_heads).to(device, self.dtype) if self.has_sinks else None

    def pages(self, device: torch.device) -> LayerPages:
        """Return pages with random KV in the contexts' slots and NaN in all others, amid pages of other layers."""
        sizes = (self._num_blocks, _NUM_PARTS, self.block_size, self.num_kv_heads, self.head_dim)
        blocks = torch.full(sizes, float("nan"), dtype=self.page_dtype or self.dtype, device=device)
        keys, values = blocks[:, 1], blocks[:, 2]
        metadata = self.metadata()
        for table, context_len in zip(metadata.block_tables, metadata.context_lens, strict=True):
            at = np.arange(context_len)
            pages, offsets = torch.from_numpy(table[at // self.block_size]), torch.from_numpy(at % self.block_size)
            for cache in (keys, values):
                rows = self._random(len(at), self.num_kv_heads, self.head_dim).to(cache.device, cache.dtype)
                cache[pages, offsets] = rows
        return LayerPages(
            keys=keys,
            values=values,
            window=self.window,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    @property
    def _num_blocks(self) -> int:
        return 3 + sum(-(-(num_computed + num_new) // self.block_size) for num_computed, num_new in self.spans)

    def _random(self, *sizes: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, sizes)) & 0xFFFF)
        return torch.randn(sizes, generator=generator)


def padded(step: DeviceStep, num_seqs: int) -> DeviceStep:
    """Return a step of only decodes with added padding rows, whose block tables point anywhere."""
    extra = num_seqs - len(step.context_lens)

    def grow(tensor: Tensor, value: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((extra, *tensor.shape[1:]), value)))

    return replace(
        step,
        positions=grow(step.positions, 0),
        slot_mapping=grow(step.slot_mapping, -1),
        context_lens=grow(step.context_lens, 0),
        block_tables=grow(step.block_tables, 1 << 30),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=step.positions.device),
    )


def assert_close(actual: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
    """Compare by the tolerance of `actual`'s dtype."""
    limit = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    if actual.dtype == torch.bfloat16 and is_interpreted():
        limit *= _TRUNCATION
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)
