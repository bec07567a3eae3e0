"""Attention over the paged cache, for steps that mix prefill chunks and decode tokens.

A step's description (`AttentionMetadata`) becomes a plan once; every layer runs it on its own pages. Portable and
plain, it is the reference for the kernels of `cpu/` and `triton_kernels/`.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from common.ids import BlockId
from engine.ops.metadata import AttentionMetadata, Ints
from engine.ops.torch_pages import ALL_HEADS, PagedRows, layer_pages
from engine.ops.torch_softmax import Softmax, attend_written_out, causal_mask
from engine.pages.kv_cache import TorchKvStore
from engine.pages.kv_format import KvFormat
from engine.weights.config import ScoreFunction
from engine.window import Window

# A decode group accepts a shorter sequence while its padded keys stay below the larger of these: another group costs
# about as much, in every layer, as reading some hundred keys.
_PADDING_TOKENS = 512
_PADDING_SHARE = 0.25


class StepAttention(Protocol):
    """Attention of one planned step."""

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write the new tokens' KV into the layer's pages, then return the attention of the queries over them.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], of one dtype; the
        result has query's shape. Each of the sinks [num_heads] is a logit that joins its head's softmax and has no
        value. Mutates the pages.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Sequences with one new token and contexts of similar length, attended together."""

    rows: Tensor
    """Rows of their tokens in the batch, int64 [num_seqs]."""
    blocks: Tensor
    """Blocks of all sequences in turn, each padded with its own first, int64 [num_seqs * blocks_per_seq]."""
    num_keys: int
    """Keys of the longest sequence; gathered keys beyond it are dropped."""
    mask: Tensor | None
    """0 or -inf on the scores, [num_seqs, 1, 1, num_keys]; None: every key counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Several new tokens of one sequence."""

    tokens: slice
    blocks: Tensor | None
    """Pages of its keys, int64 [num_blocks]; None: all keys are new, in plain causal order."""
    num_keys: int
    mask: Tensor | None
    """0 or -inf on the scores, [num_tokens, num_keys]; None exactly when `blocks` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Plan of one step, for layers of one window and kind of pages."""

    slots: Tensor
    """Slot of each new token's KV, int64 [num_tokens]."""
    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShare:
    """What one of several ranks, or the only one, does with pages that all of them have."""

    heads: slice = field(default_factory=lambda: ALL_HEADS)
    """Those of the pages' key heads that its keys and values have."""
    clears_pages: bool = True
    """Whether it clears the pages that sequences enter; the first rank does, before the others begin the step."""


WHOLE_PAGES = PageShare()


class TorchPagedAttention:
    """Gathers pages by block table and attends with torch's scaled dot product. Engine thread only."""

    def __init__(
        self,
        store: TorchKvStore,
        windows: Seq[Window | None],
        scores: Seq[ScoreFunction] = (),
        *,
        kv_layers: Seq[int] | None = None,
        dtype: torch.dtype | None = None,
        share: PageShare = WHOLE_PAGES,
    ) -> None:
        """Take a window and a score function per layer; without `scores`, all have the plain one.

        `kv_layers`: layer of the pages that each layer has; None: its own. Layers that share one have equal windows,
        and equal keys and values, which each of them writes.
        `dtype` is that of queries, keys and values; None: that of the pages, which hold no codes then.
        """
        self._store = store
        self._share = share
        self._dtype = dtype or store.kv_format.dtype
        self._kv_layers = range(len(store.layers)) if kv_layers is None else tuple(kv_layers)
        self._pages = tuple(
            () if i in store.shape.state_layers else layer_pages(store, i, self._dtype, share.heads)
            for i in self._kv_layers
        )
        self._windows = tuple(windows)
        self._scores = tuple(scores) or (ScoreFunction(),) * len(self._windows)

    def plan(self, metadata: AttentionMetadata) -> "TorchStepAttention":
        """Group decode tokens, cut chunks and build masks: all host work of a step."""
        if self._share.clears_pages:
            _clear_entered_blocks(metadata, self._store)
        window_layers = self._store.shape.window_layers
        on_pages = {False: metadata}
        if window_layers:
            on_pages[True] = metadata.on_window_pages(self._store.window_page_of)
        device = self._store.layers[0][0].device
        slots = {key: torch.from_numpy(each.slot_mapping).to(device) for key, each in on_pages.items()}
        kinds = [(window, i in window_layers) for i, window in zip(self._kv_layers, self._windows, strict=True)]
        plans = {
            (window, is_apart): _make_plan(on_pages[is_apart], slots[is_apart], window, self._store, self._dtype)
            for window, is_apart in set(kinds)
        }
        layer_plans = tuple(plans[kind] for kind in kinds)
        return TorchStepAttention(self._pages, self._store.kv_format, layer_plans, self._scores)


def _clear_entered_blocks(metadata: AttentionMetadata, store: TorchKvStore) -> None:
    """Zero the pages that a sequence enters in this step and does not fill.

    Whole pages are gathered and the part beyond a sequence's end is masked; but a NaN that another request left there
    would survive the mask, since 0 * NaN is NaN.
    """
    entered = []
    for span in metadata.spans:
        last_idx, num_filled = divmod(span.context_len, metadata.block_size)
        if num_filled and last_idx * metadata.block_size >= span.num_computed:
            entered.append(BlockId(span.block_table[last_idx]))
    if entered:
        store.clear_blocks(entered)


class TorchStepAttention:
    """A planned step; a `StepAttention`."""

    def __init__(
        self,
        pages: tuple[tuple[PagedRows, ...], ...],
        kv_format: KvFormat,
        layer_plans: tuple[_Plan, ...],
        scores: tuple[ScoreFunction, ...],
    ) -> None:
        self.pages = pages
        """Parts of each layer."""
        self.kv_format = kv_format
        self.scores = scores
        self.layer_plans = layer_plans

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write KV, then attend chunk by chunk and group by group; see `StepAttention`."""
        keys, values = pages = self.pages[layer_idx]
        # What a step reads of its own tokens is rounded like what later steps read of them.
        plan, softmax = self.layer_plans[layer_idx], Softmax(score=self.scores[layer_idx], sinks=sinks)
        key, value = keys.write(plan.slots, key), values.write(plan.slots, value)
        query = self.kv_format.mix(query)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for chunk in plan.chunks:
            output[chunk.tokens] = _attend_chunk(chunk, query, key, value, pages, softmax)
        for group in plan.groups:
            output.index_copy_(0, group.rows, attend_group(group, query.index_select(0, group.rows), pages, softmax))
        return self.kv_format.mix(output)


def _attend_chunk(
    chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, pages: tuple[PagedRows, ...], softmax: Softmax
) -> Tensor:
    """Return [num_tokens, num_heads, head_dim] for the chunk's tokens."""
    if chunk.blocks is None:
        keys, values = (new[chunk.tokens].transpose(0, 1)[None] for new in (key, value))
    else:
        keys, values = (each.gather(chunk.blocks, 1, chunk.num_keys) for each in pages)
    queries = query[chunk.tokens].transpose(0, 1)[None]
    if softmax.is_plain:
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=softmax.score.scale,
            enable_gqa=True,
        )
    else:
        mask = causal_mask(queries) if chunk.mask is None else chunk.mask
        attended = attend_written_out(queries, keys, values, mask, softmax)
    return attended[0].transpose(0, 1)


def attend_group(group: _DecodeGroup, query: Tensor, pages: tuple[PagedRows, ...], softmax: Softmax) -> Tensor:
    """Return [num_seqs, num_heads, head_dim] for one query token per sequence. Rows of one part are keys and values."""
    num_seqs, num_heads, head_dim = query.shape
    keys, *others = (each.gather(group.blocks, num_seqs, group.num_keys) for each in pages)
    values = others[0] if others else keys
    # Heads that share a key head become its query rows, so that no key is read or copied twice.
    queries = query.view(num_seqs, keys.shape[1], -1, head_dim)
    if softmax.is_plain:
        scale = softmax.score.scale
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
    else:
        attended = attend_written_out(queries, keys, values, group.mask, softmax)
    return attended.reshape(num_seqs, num_heads, head_dim)


def _make_plan(
    metadata: AttentionMetadata, slots: Tensor, window: Window | None, store: TorchKvStore, dtype: torch.dtype
) -> _Plan:
    num_new = np.diff(metadata.query_start_loc)
    chunks = [_make_chunk(metadata, int(i), window, store, dtype) for i in np.flatnonzero(num_new > 1)]
    groups = [
        _make_group(metadata, members, window, store, dtype)
        for members in _like_lengths(metadata, window, num_new == 1)
    ]
    return _Plan(slots=slots, groups=tuple(groups), chunks=tuple(chunks))


def _make_chunk(
    metadata: AttentionMetadata, seq_idx: int, window: Window | None, store: TorchKvStore, dtype: torch.dtype
) -> Chunk:
    begin, end = (int(at) for at in metadata.query_start_loc[seq_idx : seq_idx + 2])
    context_len = int(metadata.context_lens[seq_idx])
    num_new = end - begin
    if context_len == num_new and (window is None or window.first_visible(context_len - 1) <= 0):
        return Chunk(tokens=slice(begin, end), blocks=None, num_keys=num_new, mask=None)
    block_size = store.shape.block_size
    # The first query needs the earliest key.
    first_block = 0 if window is None else max(0, window.first_visible(context_len - num_new)) // block_size
    blocks = metadata.block_tables[seq_idx][first_block:]
    queries = metadata.positions[begin:end, None]
    keys = np.arange(first_block * block_size, context_len, dtype=np.int64)[None]
    visible = keys <= queries
    if window is not None:
        visible &= keys >= window.first_visible(queries)
    return Chunk(
        tokens=slice(begin, end),
        blocks=_to_device(blocks, store),
        num_keys=visible.shape[1],
        mask=_additive_mask(visible, store, dtype),
    )


def _like_lengths(metadata: AttentionMetadata, window: Window | None, decodes: npt.NDArray[np.bool_]) -> list[Ints]:
    """Split the sequences that decode into groups, longest first, whose padding stays small."""
    lens = metadata.context_lens - _oldest(metadata.context_lens, window)
    members = np.flatnonzero(decodes)
    members = members[np.argsort(-lens[members], kind="stable")]
    groups: list[Ints] = []
    start = num_keys = num_padding = 0
    for i, seq_idx in enumerate(members):
        own = int(lens[seq_idx])
        padding = int(lens[members[start]]) - own
        if num_padding + padding > max(_PADDING_TOKENS, _PADDING_SHARE * num_keys):
            groups.append(members[start:i])
            start, num_keys, num_padding, padding = i, 0, 0, 0
        num_keys += own
        num_padding += padding
    return [*groups, members[start:]] if len(members) else []


def _make_group(
    metadata: AttentionMetadata, members: Ints, window: Window | None, store: TorchKvStore, dtype: torch.dtype
) -> _DecodeGroup:
    block_size = store.shape.block_size
    context_lens = metadata.context_lens[members]
    oldest = _oldest(context_lens, window)
    first_blocks = oldest // block_size
    # Relative to the first gathered key: [begin, end) is visible.
    begin, end = oldest - first_blocks * block_size, context_lens - first_blocks * block_size
    num_keys = int(end.max())
    blocks = np.empty((len(members), -(-num_keys // block_size)), dtype=np.int64)
    for row, seq_idx, first in zip(blocks, members, first_blocks, strict=True):
        own = metadata.block_tables[seq_idx][first:]
        row[: len(own)] = own
        row[len(own) :] = own[0]
    keys = np.arange(num_keys, dtype=np.int64)
    visible = (keys >= begin[:, None]) & (keys < end[:, None])
    return _DecodeGroup(
        rows=_to_device(metadata.query_start_loc[members], store),
        blocks=_to_device(blocks.reshape(-1), store),
        num_keys=num_keys,
        mask=None if visible.all() else _additive_mask(visible[:, None, None], store, dtype),
    )


def _oldest(context_lens: Ints, window: Window | None) -> Ints:
    """Return the first key that the last token of each context sees."""
    return np.zeros_like(context_lens) if window is None else np.maximum(0, window.first_visible(context_lens - 1))


def _additive_mask(visible: npt.NDArray[np.bool_], store: TorchKvStore, dtype: torch.dtype) -> Tensor:
    # Once per step: torch would convert a boolean mask in every layer.
    hidden = torch.from_numpy(~visible).to(store.layers[0][0].device)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _to_device(values: Ints, store: TorchKvStore) -> Tensor:
    return torch.from_numpy(values).to(store.layers[0][0].device)
