"""References for the kernels around attention, in plain torch, with the same arguments. Simple, not fast."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.rope_kv_write import HeadNorms
from engine.ops.triton_kernels.step import DeviceStep


def rope_kv_write(
    qkv: Tensor, norms: HeadNorms | None, rotations: Tensor, pages: LayerPages, step: DeviceStep
) -> Tensor:
    """See `rope_kv_write.rope_kv_write`."""
    num_kv_heads = pages.num_kv_heads
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split(qkv.float(), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query = F.rms_norm(query, query.shape[-1:], norms.query.float(), norms.eps)
        key = F.rms_norm(key, key.shape[-1:], norms.key.float(), norms.eps)
    cos, sin = rotations[step.positions.long(), None].chunk(2, dim=-1)
    key = _rotate(key, cos, sin) / pages.key_scale
    value = value / pages.value_scale
    if pages.keys.dtype == torch.float8_e4m3fn:
        key, value = key.clamp(-448, 448), value.clamp(-448, 448)
    for token, slot in enumerate(step.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, pages.block_size)
            pages.keys[block, offset] = key[token].to(pages.keys.dtype)
            pages.values[block, offset] = value[token].to(pages.values.dtype)
    return _rotate(query, cos, sin).to(qkv.dtype)


def decode_attention(
    output: Tensor, query: Tensor, pages: LayerPages, step: DeviceStep, sinks: Tensor | None = None
) -> None:
    """See `decode_attention.decode_attention`."""
    for index in range(step.num_decodes):
        if step.decode_seqs is None:
            seq = token = index
        else:
            seq = int(step.decode_seqs[index])
            token = int(step.query_start_loc[seq])
        output[token : token + 1] = _attend_sequence(query[token : token + 1], pages, step, seq, sinks)


def prefill_attention(
    output: Tensor, query: Tensor, pages: LayerPages, step: DeviceStep, sinks: Tensor | None = None
) -> None:
    """See `prefill_attention.prefill_attention`."""
    if step.prefill_tiles is None:
        return
    for seq in set(step.prefill_tiles[:, 0].tolist()):
        begin, end = step.query_start_loc[seq : seq + 2].tolist()
        output[begin:end] = _attend_sequence(query[begin:end], pages, step, seq, sinks)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend_sequence(query: Tensor, pages: LayerPages, step: DeviceStep, seq: int, sinks: Tensor | None) -> Tensor:
    """Return the attention of the last len(query) tokens of a sequence, [num_new, num_heads, head_dim]."""
    context_len = int(step.context_lens[seq])
    if context_len == 0:
        return torch.zeros_like(query)
    num_blocks = -(-context_len // pages.block_size)
    blocks = step.block_tables[seq, :num_blocks].long()
    group = query.shape[1] // pages.num_kv_heads
    key, value = (
        cache[blocks].float().flatten(0, 1)[:context_len].repeat_interleave(group, dim=1) * scale
        for cache, scale in ((pages.keys, pages.key_scale), (pages.values, pages.value_scale))
    )
    at_query = torch.arange(context_len - len(query), context_len, device=query.device)[:, None]
    at_key = torch.arange(context_len, device=query.device)[None]
    hidden = at_key > at_query
    if pages.window is not None:
        hidden |= at_key <= at_query - pages.window
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * query.shape[-1] ** -0.5
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:2], 1)), -1)
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
