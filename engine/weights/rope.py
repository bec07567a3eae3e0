"""Rotary position embedding and its published scalings, computed in float32."""

import math

import torch
from torch import Tensor

from engine.weights.config import DecoderConfig
from engine.weights.nope import QueryGrowth
from engine.weights.rope_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Rotates pairs (i, i + head_dim / 2) of a head by an angle that grows with the position.

    An angle depends only on its position, so that cached keys stay valid as a sequence grows. (Dynamic NTK scaling
    has the frequencies of the longest text from the start: engine/weights/config.py.)
    """

    def __init__(
        self, config: RopeConfig | None, *, head_dim: int, device: torch.device, growth: QueryGrowth | None = None
    ) -> None:
        """`config`: None turns nothing."""
        inv_freq = torch.zeros(head_dim // 2) if config is None else inverse_frequencies(config, head_dim)
        self._inv_freq = inv_freq.to(device)
        self._scale = 1.0 if config is None else attention_factor(config)
        self._growth = growth

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin), [num_tokens, 1, head_dim] each, for `rotate`; positions is int64 [num_tokens]."""
        cos, sin = self.half_angles(positions)
        # The sine carries the sign of rotate-half, so that `rotate` only swaps the halves.
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]

    def half_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of each pair, float32 [num_tokens, head_dim / 2], contiguous."""
        freqs = positions[:, None].float() * self._inv_freq
        return freqs.cos() * self._scale, freqs.sin() * self._scale

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return what rotated queries are multiplied by, float32 [num_tokens], contiguous; None: 1."""
        if self._growth is None:
            return None
        steps = torch.floor((positions.float() + 1) / self._growth.num_tokens)
        return torch.log1p(steps) * self._growth.strength + 1


def layer_ropes(config: DecoderConfig, device: torch.device) -> tuple[RotaryEmbedding, ...]:
    """Return the rotary embedding of each layer; layers with the same frequencies share one."""
    ropes = [config.rope_of(layer_idx) for layer_idx in range(config.num_layers)]
    made = {rope: RotaryEmbedding(rope, head_dim=config.rope_dim, device=device) for rope in set(ropes) - {None}}
    if config.nope is not None:
        growth = config.nope.query_growth
        made[None] = RotaryEmbedding(None, head_dim=config.rope_dim, device=device, growth=growth)
    return tuple(made[rope] for rope in ropes)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return heads [num_tokens, num_heads, head_dim], of which as many values as there are angles are rotated."""
    if heads.shape[-1] > cos.shape[-1]:
        turned, others = heads.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat((rotate(turned, cos, signed_sin), others), dim=-1)
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * signed_sin


def halves(heads: Tensor) -> Tensor:
    """Return heads [..., head_dim] whose pairs (2i, 2i + 1) have moved to (i, i + head_dim / 2)."""
    return torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1)


def attention_factor(config: RopeConfig) -> float:
    """Return the factor on cos and sin: 1 except for YaRN, which sharpens attention as it stretches it."""
    if config.rope_type is not RopeType.YARN:
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return config.sharpness(config.mscale) / config.sharpness(config.mscale_all_dim)
    return config.sharpness(1.0)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position of each pair, float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (config.theta**exponents)
    match config.rope_type:
        case RopeType.DEFAULT | RopeType.DYNAMIC:
            return inv_freq
        case RopeType.LINEAR:
            return inv_freq / config.factor
        case RopeType.LLAMA3:
            return _llama3(inv_freq, config)
        case RopeType.YARN:
            return _yarn(inv_freq, config, head_dim)


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / inv_freq
    trained = config.original_max_position_embeddings
    blend = (trained / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    stretched = inv_freq / config.factor
    blended = (1 - blend) * stretched + blend * inv_freq
    is_long = wavelengths > trained / config.low_freq_factor
    is_short = wavelengths < trained / config.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, inv_freq, blended))


def _yarn(inv_freq: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Stretch pairs that turn less than beta_slow times over the trained length, keep those above beta_fast (YaRN)."""

    def pair_with(num_turns: float) -> float:
        turns_per_radian = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns_per_radian) / (2 * math.log(config.theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.rounds_correction_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * (1 - kept) + inv_freq * kept
