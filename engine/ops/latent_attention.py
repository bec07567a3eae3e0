"""Latent attention over the paged cache, in torch: a page has one row for a token, and heads are made from it.

A few queries are multiplied into the space of the rows, which then are the one key of all heads, and their values too.
Many queries get the keys and values of each head, which are smaller than rows: made once, they serve all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.torch_attention import Chunk, TorchStepAttention, attend_group
from engine.ops.torch_softmax import Softmax
from engine.weights.latent import LatentConfig


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The products between rows and heads."""

    config: LatentConfig
    up: Tensor
    """[num_heads, nope_dim + value_dim, rank]: what makes the keys and the values of each head from a row."""

    def into_rows(self, query: Tensor) -> Tensor:
        """Return queries [num_tokens, num_heads, row_size] whose scores with rows are those of `query` with keys."""
        return self.join(*torch.split(query, [self.config.nope_dim, self.config.rope_dim], dim=-1))

    def join(self, nope: Tensor, rope: Tensor) -> Tensor:
        """Return what `into_rows` does, of queries in two parts."""
        keys = self.up[:, : self.config.nope_dim]
        return torch.cat((torch.bmm(nope.transpose(0, 1), keys).transpose(0, 1), rope), dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """Return [num_tokens, num_heads, value_dim] of sums of rows [num_tokens, num_heads, row_size]."""
        sums = attended[..., : self.config.rank].transpose(0, 1).contiguous()
        # The other way round torch would copy the weights.
        return torch.bmm(self.up[:, self.config.nope_dim :], sums.transpose(1, 2)).permute(2, 0, 1)

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [num_heads, num_rows, query_dim or value_dim] of rows [num_rows, row_size]."""
        latent, rope = torch.split(rows, [self.config.rank, self.config.rope_dim], dim=-1)
        made = F.linear(latent, self.up.flatten(0, 1)).view(len(rows), *self.up.shape[:2]).transpose(0, 1)
        nope, values = torch.split(made, [self.config.nope_dim, self.config.value_dim], dim=-1)
        return torch.cat((nope, rope.expand(*nope.shape[:2], -1)), dim=-1), values


def attend_latent(step: TorchStepAttention, layer_idx: int, query: Tensor, row: Tensor, heads: LatentHeads) -> Tensor:
    """Write the new tokens' rows into the layer's pages, then return the attention of the queries over them.

    query [num_tokens, num_heads, query_dim], row [num_tokens, 1, row_size], both rotated; the result is [num_tokens,
    num_heads, value_dim]. Mutates the pages.
    """
    (pages,) = step.pages[layer_idx]
    mix, plan, score = step.kv_format.mix, step.layer_plans[layer_idx], step.scores[layer_idx]
    rows = pages.write(plan.slots, row)
    output = query.new_empty((*query.shape[:2], heads.config.value_dim))
    for chunk in plan.chunks:
        found = rows[chunk.tokens, 0] if chunk.blocks is None else pages.gather(chunk.blocks, 1, chunk.num_keys)[0, 0]
        output[chunk.tokens] = attend_chunk(chunk, query[chunk.tokens], mix(found), heads, score.scale)
    for group in plan.groups:
        into_rows = mix(heads.into_rows(query.index_select(0, group.rows)))
        sums = attend_group(group, into_rows, (pages,), Softmax(score=score))
        output.index_copy_(0, group.rows, heads.values(mix(sums)))
    return output


def attend_chunk(chunk: Chunk, query: Tensor, rows: Tensor, heads: LatentHeads, scale: float | None) -> Tensor:
    """Return [num_tokens, num_heads, value_dim] for the chunk's tokens and the rows of all that they may attend to."""
    expands = len(query) >= heads.config.expands_from
    if expands:
        keys, values = heads.expand(rows)
        values = F.pad(values, (0, max(0, keys.shape[-1] - values.shape[-1])))  # torch is faster with equal sizes
    else:
        query = heads.into_rows(query)
        keys = values = rows.expand(query.shape[1], -1, -1)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )[0].transpose(0, 1)
    return attended[..., : heads.config.value_dim] if expands else heads.values(attended)
