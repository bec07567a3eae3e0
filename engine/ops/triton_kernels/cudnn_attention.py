"""Causal attention of chunks by cuDNN, through torch, over keys and values gathered from pages.

An alternative to `prefill_attention` with the same contract, chosen by `model.kernels: cudnn`. It has not run on a GPU
yet: where it is faster has to be measured.

Through torch, cuDNN neither reads pages nor takes a prefix but by a mask. So a chunk attends to its own tokens, which
needs no mask, then to its prefix, piece by piece, and the results are merged by the logarithms of their sums. What it
needs of memory does not depend on the prefix, and no score is computed that does not count.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.prefill_attention import prefill_attention
from engine.ops.triton_kernels.step import Chunk, DeviceStep

_aten = torch.ops.aten

_PIECE_TOKENS = 1 << 14
"""Tokens of a prefix whose keys and values are gathered at a time."""


def cudnn_attention(
    output: Tensor, query: Tensor, pages: LayerPages, step: DeviceStep, sinks: Tensor | None = None
) -> None:
    """Write the attention of the tokens of `step.chunks` over their contexts into their rows of `output`.

    Layers with a window or sinks, pages of another dtype, and what cuDNN does not take, go to `prefill_attention`.
    """
    if not step.chunks:
        return
    if pages.window is not None or sinks is not None or not _can_attend(query, pages, step):
        prefill_attention(output, query, pages, step, sinks)
        return
    for chunk in step.chunks:
        own = query.narrow(0, chunk.first_token, chunk.num_tokens)
        attended = _attend_chunk(own, pages, step.block_tables.select(0, chunk.seq), chunk)
        output.narrow(0, chunk.first_token, chunk.num_tokens).copy_(attended)


def _can_attend(query: Tensor, pages: LayerPages, step: DeviceStep) -> bool:
    """Return whether cuDNN takes the chunks of a step. It takes no single key."""
    if pages.keys.dtype is not query.dtype or any(chunk.context_len - chunk.num_tokens == 1 for chunk in step.chunks):
        return False
    if query.device.type != "cuda":
        return True
    heads = query.transpose(0, 1).unsqueeze(0)
    keys = heads.narrow(1, 0, pages.num_kv_heads)
    params = torch.backends.cuda.SDPAParams(heads, keys, keys, None, 0.0, False, True)  # noqa: FBT003 - it has no names
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _attend_chunk(query: Tensor, pages: LayerPages, table: Tensor, chunk: Chunk) -> Tensor:
    """Return the attention of a chunk with a block table, [num_tokens, num_heads, head_dim]."""
    heads = query.transpose(0, 1).unsqueeze(0)
    num_before = chunk.context_len - chunk.num_tokens
    attended, log_sums = _attend(heads, pages, table, range(num_before, chunk.context_len), is_causal=True)
    if num_before:
        attended = attended.float()
    for piece in _pieces(num_before):
        more, more_sums = _attend(heads, pages, table, piece, is_causal=False)
        attended.lerp_(more.float(), torch.sigmoid(more_sums - log_sums))
        log_sums = torch.logaddexp(log_sums, more_sums)
    return attended.squeeze(0).transpose(0, 1)


def _pieces(num_tokens: int) -> Iterator[range]:
    """Yield the pieces of a prefix, none of a single token."""
    begin = 0
    while begin < num_tokens:
        end = min(begin + _PIECE_TOKENS, num_tokens)
        end += num_tokens - end == 1
        yield range(begin, end)
        begin = end


def _attend(
    heads: Tensor, pages: LayerPages, table: Tensor, tokens: range, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to some tokens of a sequence, and the logarithms of the sums of its weights.

    heads is [1, num_heads, num_tokens, head_dim]; so is the first result, the second float32 [1, num_heads, num_tokens,
    1]. `is_causal`: query i sees the first i + 1 of the tokens; else each sees all.
    """
    keys, values = (_gather(stored, table, tokens) for stored in (pages.keys, pages.values))
    scale = pages.score_scale
    if heads.device.type == "cuda":
        attended, log_sums, *_ = _aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - others keep the sums
            heads, keys, values, None, compute_log_sumexp=True, is_causal=is_causal, scale=scale
        )
    else:  # its twin
        attended, log_sums = _aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - likewise
            heads, keys, values, is_causal=is_causal, scale=scale
        )
    return attended, log_sums.view(*heads.shape[:3], 1)


def _gather(stored: Tensor, table: Tensor, tokens: range) -> Tensor:
    """Return keys or values of some tokens of a sequence, [1, num_kv_heads, len(tokens), head_dim]."""
    block_size = stored.shape[1]
    first, end = tokens.start // block_size, -(-tokens.stop // block_size)
    rows = stored.index_select(0, table.narrow(0, first, end - first)).flatten(0, 1)
    return rows.narrow(0, tokens.start - first * block_size, len(tokens)).transpose(0, 1).unsqueeze(0)
