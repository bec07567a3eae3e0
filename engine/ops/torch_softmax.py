"""Attention whose softmax torch's scaled dot product does not have: with a softcap, or with sinks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.config import ScoreFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """How a layer weighs its keys."""

    score: ScoreFunction
    sinks: Tensor | None = None
    """See `StepAttention.attend`."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's scaled dot product has it."""
        return self.score.softcap is None and self.sinks is None


def attend_written_out(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Return [n, num_heads, num_queries, head_dim], like scaled_dot_product_attention, which has no softcap or sinks.

    queries [n, num_heads, num_queries, head_dim]; keys, values [n, num_kv_heads, num_keys, head_dim]; mask is added to
    the scores [n, num_heads, num_queries, num_keys], which are materialised here.
    """
    n, num_heads, num_queries, head_dim = queries.shape
    scale, softcap = softmax.score.scale, softmax.score.softcap
    scale = head_dim**-0.5 if scale is None else scale
    grouped = queries.view(n, keys.shape[1], -1, num_queries, head_dim)
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if softmax.sinks is not None:  # those of heads that share a key head may be the sinks of its query rows
        sinks = softmax.sinks.view(1, num_heads, -1, 1).expand(n, num_heads, num_queries, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[2]].to(values.dtype)
    attended = weights.view(*grouped.shape[:-1], -1) @ values.unsqueeze(2)
    return attended.view(n, num_heads, num_queries, head_dim)


def causal_mask(queries: Tensor) -> Tensor:
    """Return 0 or -inf, [num_queries, num_queries], for queries whose keys are all new."""
    size = queries.shape[-2]
    return torch.full((size, size), float("-inf"), dtype=queries.dtype, device=queries.device).triu_(1)
