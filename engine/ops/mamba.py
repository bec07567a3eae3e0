"""Mamba-2 over pages of states, in torch: token by token, in an order that no cut of a text changes.

    step_t  = softplus(time step + bias), within limits
    state_t = exp(-step_t * rate of decay) * state_(t - 1) + step_t * x_t * write_t     [head_dim, state_dim] of a head
    y_t     = state_t @ read_t + skip * x_t
    out_t   = y_t * silu(gate_t), each group over its root mean square, * norm

The compiled kernel (`cpu/mamba.h`) computes in this order, too.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.recurrent import StepStates, convolve
from engine.weights.decoder_weights import RecurrentWeights
from engine.weights.mamba import MambaConfig


def recur(
    config: MambaConfig, layer_idx: int, projected: Tensor, weights: RecurrentWeights, step: StepStates, *, eps: float
) -> Tensor:
    """Return what `RecurrentStepOps.recur` does. `eps`: of the norm of the results."""
    parts = [config.output_size, config.num_channels, config.num_heads]
    gate, mixed, steps = projected.float().split_with_sizes(parts, dim=1)
    pages = step.read(layer_idx)
    convolved = convolve(mixed.contiguous(), pages, step, weights)
    steps = F.softplus(steps + weights.step_bias).clamp(*config.time_step_limits)
    states = pages[:, config.conv_state_size :].view(len(pages), config.num_heads, config.head_dim, config.state_dim)
    y = _scan(config, convolved, steps, weights, states, step)
    step.write(layer_idx, pages)
    gated = (y.flatten(1) * F.silu(gate)).view(len(y), config.num_groups, -1)
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weights.norm).to(projected.dtype)


def _scan(
    config: MambaConfig, convolved: Tensor, steps: Tensor, weights: RecurrentWeights, states: Tensor, step: StepStates
) -> Tensor:
    """Return y, float32 [num_tokens, num_heads, head_dim], of a step's tokens. Mutates states.

    convolved [num_tokens, num_channels], steps [num_tokens, num_heads], states [num_seqs, num_heads, head_dim,
    state_dim].
    """
    parts = [config.output_size, config.group_size, config.group_size]
    x, *both = convolved.split_with_sizes(parts, dim=1)
    x = x.reshape(-1, config.num_heads, config.head_dim)
    num_shared = config.num_heads // config.num_groups
    write, read = (each.reshape(len(each), config.num_groups, -1).repeat_interleave(num_shared, dim=1) for each in both)
    keeps = torch.exp(steps * -weights.log_decay.exp())
    scaled = x * steps[..., None]
    assert weights.skip is not None, f"{config} has factors that are missing"
    y = x * weights.skip[:, None]
    # Longest first: of sequences so ordered the first ones have a token number t.
    lengths = step.starts.diff()
    order = lengths.argsort(descending=True, stable=True)
    ordered, starts, lengths = states[order], step.starts[order], lengths[order]
    for t in range(int(lengths[0])):
        rows = starts[lengths > t] + t
        state = ordered[: len(rows)]
        state.mul_(keeps[rows][..., None, None]).add_(scaled[rows][..., None] * write[rows][:, :, None])
        y[rows] += (state * read[rows][:, :, None]).sum(-1)
    states[order] = ordered
    return y
