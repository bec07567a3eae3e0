"""The parts of a layer in pages, for attention in torch: written and gathered in the activations' dtype."""

import math
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_store import KvShape
from engine.pages.kv_cache import TorchKvStore
from engine.pages.kv_format import SCALE_DTYPE, TOKEN_GROUP, KvFormat


class PagedRows(Protocol):
    """One part of a layer: its keys, its values, or its latent rows."""

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store rows [num_tokens, num_kv_heads, head_dim] at int64 slots; return them as they will be read."""
        ...

    def gather(self, blocks: Tensor, num_seqs: int, num_keys: int) -> Tensor:
        """Return the first keys of each sequence, [num_seqs, num_kv_heads, num_keys, head_dim].

        blocks, int64 [num_seqs * blocks_per_seq], has all sequences in turn.
        """
        ...


ALL_HEADS = slice(None)


def layer_pages(
    store: TorchKvStore, layer_idx: int, dtype: torch.dtype, heads: slice = ALL_HEADS
) -> tuple[PagedRows, ...]:
    """Return a layer's parts, as rows of `dtype`; a part of codes that is alone has the order of keys.

    `heads`: those of a page's key heads that the rows have.
    """
    parts = store.layers[layer_idx]
    of_heads = (*(ALL_HEADS,) * 4, heads)
    if store.kv_format.is_grouped:
        views = zip((_grouped_keys, _grouped_values), parts, strict=True)
        return tuple(_GroupedPages(view(part)[of_heads]) for view, part in views)
    if not store.kv_format.has_codes:
        return tuple(_PlainPages(part[:, :, heads]) for part in parts)
    layout = CodeLayout(store.shape, store.kv_format)
    views = zip((layout.keys, layout.values), parts, strict=False)
    return tuple(
        _CodedPages(view(part)[of_heads], layout.scales(part)[of_heads], store.kv_format, dtype) for view, part in views
    )


class CodeLayout:
    """Views of the codes and scales in a layer's pages, uint8 [num_blocks, page]; see `engine.pages.kv_cache`.

    The first dimensions of a view are a token's place, as `place` gives it; the others are what it stores.
    """

    def __init__(self, shape: KvShape, kv_format: KvFormat) -> None:
        self._groups = shape.block_size // TOKEN_GROUP, shape.num_kv_heads
        self._row_bytes = kv_format.code_bytes(shape.head_dim)
        self._row_scales = kv_format.row_scales(shape.head_dim)

    def keys(self, pages: Tensor) -> Tensor:
        """Return [num_blocks, groups, 4, 4 tokens, num_kv_heads, row_bytes / 4, 4]."""
        return self._codes(pages, self._row_bytes // 4, 4, 4, 4).permute(0, 1, 4, 5, 2, 3, 6)

    def values(self, pages: Tensor) -> Tensor:
        """Return [num_blocks, groups, 4, 4 tokens, num_kv_heads, row_bytes]."""
        return self._codes(pages, 4, self._row_bytes, 4).permute(0, 1, 3, 5, 2, 4)

    def scales(self, pages: Tensor) -> Tensor:
        """Return [num_blocks, groups, 4, 4 tokens, num_kv_heads, row_scales]."""
        num_bytes = math.prod(self._groups) * TOKEN_GROUP * self._row_bytes
        scales = pages[:, num_bytes:].view(SCALE_DTYPE)
        return scales.view(len(pages), *self._groups, self._row_scales, 4, 4).permute(0, 1, 4, 5, 2, 3)

    def _codes(self, pages: Tensor, *sizes: int) -> Tensor:
        num_bytes = math.prod(self._groups) * TOKEN_GROUP * self._row_bytes
        return pages[:, :num_bytes].view(len(pages), *self._groups, *sizes)


def place(slots: Tensor, block_size: int, pack: int = 4) -> tuple[Tensor, ...]:
    """Return the indices of int64 slots in the first dimensions of a view of `CodeLayout`, or of pages in groups.

    `pack`: tokens in the last of these dimensions.
    """
    offset = slots % block_size
    return slots // block_size, offset // TOKEN_GROUP, offset % TOKEN_GROUP // pack, offset % pack


def _take(view: Tensor, blocks: Tensor, num_seqs: int) -> Tensor:
    """Return [num_seqs, tokens, num_kv_heads, what it stores] of a view whose first four dimensions are a place."""
    taken = view.index_select(0, blocks).flatten(5)
    return taken.reshape(num_seqs, -1, *taken.shape[4:])


def _grouped_keys(pages: Tensor) -> Tensor:
    """Return [num_blocks, groups, 16 / pack, pack tokens, num_kv_heads, head_dim / pack, pack] of keys in groups."""
    pack = 4 // pages.itemsize
    rows = pages.view(*pages.shape[:3], -1, TOKEN_GROUP // pack, pack, pack)
    return rows.permute(0, 1, 4, 5, 2, 3, 6)


def _grouped_values(pages: Tensor) -> Tensor:
    """Return [num_blocks, groups, 16 / pack, pack tokens, num_kv_heads, head_dim] of values in groups."""
    pack = 4 // pages.itemsize
    return pages.view(*pages.shape[:3], TOKEN_GROUP // pack, -1, pack).permute(0, 1, 3, 5, 2, 4)


class _PlainPages:
    """Pages of values, in the activations' dtype. A `PagedRows`."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        block_size = self._cache.shape[1]
        self._cache[slots // block_size, slots % block_size] = rows
        return rows

    def gather(self, blocks: Tensor, num_seqs: int, num_keys: int) -> Tensor:
        gathered = self._cache.index_select(0, blocks).view(num_seqs, -1, *self._cache.shape[2:])
        return gathered[:, :num_keys].transpose(1, 2)


class _GroupedPages:
    """Pages of values in groups, in the activations' dtype. A `PagedRows`."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        at = place(slots, self._rows.shape[1] * TOKEN_GROUP, self._rows.shape[3])
        self._rows[at] = rows.view(-1, *self._rows.shape[4:])
        return rows

    def gather(self, blocks: Tensor, num_seqs: int, num_keys: int) -> Tensor:
        return _take(self._rows, blocks, num_seqs)[:, :num_keys].transpose(1, 2)


class _CodedPages:
    """Pages of codes and scales. A `PagedRows`. Rows read back are mixed, see `KvFormat.mix`."""

    def __init__(self, codes: Tensor, scales: Tensor, kv_format: KvFormat, dtype: torch.dtype) -> None:
        self._codes = codes
        self._scales = scales
        self._format = kv_format
        self._dtype = dtype

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        codes, scales = self._format.encode(rows)
        at = place(slots, self._codes.shape[1] * TOKEN_GROUP)
        self._codes[at] = codes.view(-1, *self._codes.shape[4:])
        self._scales[at] = scales
        return self._format.decode(codes, scales, self._dtype)

    def gather(self, blocks: Tensor, num_seqs: int, num_keys: int) -> Tensor:
        codes, scales = (_take(view, blocks, num_seqs)[:, :num_keys] for view in (self._codes, self._scales))
        return self._format.decode(codes, scales, self._dtype).transpose(1, 2)
