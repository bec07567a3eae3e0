"""Latent attention of a step: products between heads and rows, by torch, around the kernels.

Whole prompts get the keys and values of each head, as in `engine.ops.latent_attention`: less arithmetic than products
with rows, for memory that a step's number of tokens bounds. All other chunks attend to rows in pages, which takes none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.latent_attention import LatentHeads, attend_chunk
from engine.ops.torch_attention import Chunk
from engine.ops.triton_kernels.elementwise import rms_norm
from engine.ops.triton_kernels.key_splits import KeySplits
from engine.ops.triton_kernels.latent_attention import attend_latent_chunks, decode_latent
from engine.ops.triton_kernels.latent_rows import LatentPages
from engine.ops.triton_kernels.latent_write import LatentRotation, latent_write
from engine.ops.triton_kernels.step import DeviceStep
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import LatentWeights, Linear
from engine.weights.latent import LATENT_EPS, LatentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """A layer, apart from its weights."""

    num_heads: int
    config: LatentConfig
    pages: LatentPages
    angles: Tensor
    """See `LatentRotation`."""


def attend_latent(
    layer: LatentLayer, compressed: Tensor, weights: LatentWeights, step: DeviceStep, splits: KeySplits
) -> Tensor:
    """Return what `LatentStepOps.attend_latent` does. Also overwrites `splits`' tensors."""
    latent, num_heads = layer.config, layer.num_heads
    query, row = torch.split(compressed, [compressed.shape[1] - latent.row_size, latent.row_size], dim=1)
    if weights.query_up is not None and weights.query_norm is not None:
        query = weights.query_up(rms_norm(query.contiguous(), weights.query_norm, LATENT_EPS))
    query = torch.unflatten(query, 1, (num_heads, latent.query_dim))
    rotation = LatentRotation(
        norm=weights.row_norm,
        eps=LATENT_EPS,
        angles=layer.angles,
        has_interleaved_pairs=latent.has_interleaved_pairs,
    )
    nope, rope = query[..., : latent.nope_dim], latent_write(query, row, rotation, layer.pages, step)
    heads = LatentHeads(latent, weights.row_up.view(num_heads, -1, latent.rank))
    expands = _are_whole_prompts(step, latent)
    if expands and not step.num_decodes:
        attended = query.new_empty((len(query), num_heads, latent.value_dim))
    else:
        attended = heads.values(_attend_rows(heads.join(nope, rope), layer, step, splits, has_chunks=not expands))
    if expands:
        _attend_whole_prompts(attended, torch.cat((nope, rope), dim=-1), heads, layer.pages, step)
    return attended.flatten(1)


def _are_whole_prompts(step: DeviceStep, latent: LatentConfig) -> bool:
    """Whether all chunks are, and so long that keys and values of their own are less arithmetic."""
    least = latent.expands_from
    return bool(step.chunks) and all(each.context_len == each.num_tokens >= least for each in step.chunks)


def _attend_rows(query: Tensor, layer: LatentLayer, step: DeviceStep, splits: KeySplits, *, has_chunks: bool) -> Tensor:
    """Return sums of rows [num_tokens, num_heads, rank] for queries [num_tokens, num_heads, row_size]."""
    output = query.new_empty((*query.shape[:2], layer.config.rank))
    if step.num_decodes:
        decode_latent(output, query, layer.pages, step, splits)
    if has_chunks:
        attend_latent_chunks(output, query, layer.pages, step)
    return output


def _attend_whole_prompts(
    output: Tensor, query: Tensor, heads: LatentHeads, pages: LatentPages, step: DeviceStep
) -> None:
    """Write the attention of the chunks' tokens into their rows of output [num_tokens, num_heads, value_dim]."""
    scale = pages.score_scale
    for chunk in step.chunks:
        tokens = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        table = step.block_tables[chunk.seq, : -(-chunk.context_len // pages.block_size)]
        rows = pages.rows.index_select(0, table).flatten(0, 2)[: chunk.context_len]
        whole = Chunk(tokens=tokens, blocks=None, num_keys=chunk.context_len, mask=None)
        output[tokens] = attend_chunk(whole, query[tokens], rows, heads, scale)


def latent_trial(config: DecoderConfig, latent: LatentConfig, like: Tensor) -> tuple[Tensor, LatentWeights]:
    """Return inputs of `attend_latent` for as many tokens as `like` has, and weights: zeros, to compile kernels."""

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=like.device)

    rank, query_size = latent.query_rank, config.num_heads * latent.query_dim
    weights = LatentWeights(
        query_norm=None if rank is None else ones(rank),
        query_up=None if rank is None else Linear(weight=like.new_zeros((query_size, rank)), bias=None),
        row_norm=ones(latent.rank),
        row_up=like.new_zeros((config.num_heads * (latent.nope_dim + latent.value_dim), latent.rank)),
    )
    return like.new_zeros((len(like), (rank or query_size) + latent.row_size)), weights
