"""Gated delta nets over pages of states, in torch: token by token, in an order that no cut of a text changes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.recurrent import StepStates, convolve
from engine.weights.decoder_weights import RecurrentWeights
from engine.weights.delta import DeltaConfig, Features

_LENGTH_EPS = 1e-6  # of queries and keys, whatever config.json says of the norms


def recur(
    config: DeltaConfig, layer_idx: int, projected: Tensor, weights: RecurrentWeights, step: StepStates, *, eps: float
) -> Tensor:
    """Return what `RecurrentStepOps.recur` does. `eps`: of the norm of the results."""
    wide, at = projected.float(), config.features
    states = step.read(layer_idx)
    mixed = torch.cat([_take(wide, each, config).flatten(1) for each in (at.query, at.key, at.value)], dim=1)
    query, key, value = convolve(mixed, states, step, weights).split_with_sizes(
        [config.key_size, config.key_size, config.output_size], dim=1
    )
    num_shared = config.num_heads // config.num_key_heads
    query, key = (
        _unit(each.view(len(wide), -1, config.key_dim)).repeat_interleave(num_shared, dim=1) for each in (query, key)
    )
    value = value.view(len(wide), -1, config.value_dim)
    rate = _take(wide, at.rate, config).flatten(1).sigmoid()
    decay = -weights.log_decay.exp() * F.softplus(_take(wide, at.decay, config).flatten(1) + weights.step_bias)
    tokens = (query * config.key_dim**-0.5, key, value, rate, decay.exp())
    matrices = states[:, -config.num_heads * config.key_dim * config.value_dim :]
    matrices = matrices.view(len(states), config.num_heads, config.key_dim, config.value_dim)
    results = torch.empty_like(value)
    if step.is_decode:
        results = _write(matrices, *tokens)
    else:
        for span in step.spans:
            for i in range(span.tokens.start, span.tokens.stop):
                own = matrices[span.seq_idx : span.seq_idx + 1]
                results[i] = _write(own, *(each[i : i + 1] for each in tokens))[0]
    step.write(layer_idx, states)
    normed = results * torch.rsqrt(results.square().mean(-1, keepdim=True) + eps) * weights.norm
    gate = _take(wide, at.gate, config).reshape(results.shape)
    return (normed * F.silu(gate)).flatten(1).to(projected.dtype)


def _take(rows: Tensor, at: Features, config: DeltaConfig) -> Tensor:
    """Return some values of rows [num_tokens, features], [num_tokens, num_key_heads, size]."""
    sizes, strides = (len(rows), config.num_key_heads, at.size), (rows.stride(0), at.stride, 1)
    return rows.as_strided(sizes, strides, rows.storage_offset() + at.begin)


def _unit(heads: Tensor) -> Tensor:
    """Return heads [num_tokens, num_heads, key_dim] of the length 1."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _write(matrices: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
    """Write a token of each sequence to its matrices, and return what its queries find there afterwards.

    matrices [num_seqs, num_heads, key_dim, value_dim], mutated; query and key [num_seqs, num_heads, key_dim], value
    and results [num_seqs, num_heads, value_dim], rate and decay [num_seqs, num_heads].
    """
    matrices.mul_(decay[..., None, None])
    found = (matrices * key[..., None]).sum(-2)
    matrices.add_(key[..., None] * ((value - found) * rate[..., None])[..., None, :])
    return (matrices * query[..., None]).sum(-2)
