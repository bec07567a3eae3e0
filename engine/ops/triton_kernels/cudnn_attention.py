"""Causal attention of chunks by cuDNN, through torch, over keys and values gathered from pages.

An alternative to `prefill_attention` with the same contract, chosen by `model.kernels: cudnn`. It has not run on a GPU
yet: where it is faster has to be measured. A chunk behind a cached prefix gets its mask as a matrix, and key heads are
copied for each of their query heads, since cuDNN's path in torch takes neither by description.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.prefill_attention import prefill_attention
from engine.ops.triton_kernels.step import Chunk, DeviceStep

# In this order; those behind the first are for shapes that it refuses, and for devices without it.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cudnn_attention(
    output: Tensor, query: Tensor, pages: LayerPages, step: DeviceStep, sinks: Tensor | None = None
) -> None:
    """Write the attention of the tokens of `step.chunks` over their contexts into their rows of `output`.

    Layers with a window or sinks, and pages of another dtype, go to `prefill_attention`.
    """
    if pages.window is not None or sinks is not None or pages.keys.dtype is not query.dtype:
        prefill_attention(output, query, pages, step, sinks)
        return
    group = query.shape[1] // pages.num_kv_heads
    for chunk in step.chunks:
        rows = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        table = step.block_tables[chunk.seq, : -(-chunk.context_len // pages.block_size)]
        keys, values = (_gather(each, table, chunk.context_len, group) for each in (pages.keys, pages.values))
        mask = None if chunk.num_tokens == chunk.context_len else _mask(chunk, query)
        with sdpa_kernel(_BACKENDS, set_priority=True):
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=pages.score_scale,
            )
        output[rows] = attended[0].transpose(0, 1)


def _gather(stored: Tensor, table: Tensor, context_len: int, group: int) -> Tensor:
    """Return keys or values of a sequence, [1, num_heads, context_len, head_dim]."""
    rows = stored.index_select(0, table).flatten(0, 1)[:context_len]
    return rows.repeat_interleave(group, dim=1).transpose(0, 1)[None]


def _mask(chunk: Chunk, query: Tensor) -> Tensor:
    """Return 0 where a token sees a key and -inf elsewhere, [num_tokens, context_len]."""
    hidden = torch.full((chunk.num_tokens, chunk.context_len), float("-inf"), dtype=query.dtype, device=query.device)
    return hidden.triu_(chunk.context_len - chunk.num_tokens + 1)
