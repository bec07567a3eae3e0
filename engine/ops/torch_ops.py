"""Portable implementation of the decoder's operations, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kv_cache import TorchKvStore
from engine.model.config import DecoderConfig
from engine.model.rope import RotaryEmbedding, rotate
from engine.ops.metadata import AttentionMetadata
from engine.ops.torch_attention import StepAttention, TorchPagedAttention


class TorchOps:
    """Any device, any dtype; an `Ops`."""

    name = "torch"

    def __init__(self, config: DecoderConfig, store: TorchKvStore, dtype: torch.dtype | None = None) -> None:
        """Take the activations' dtype; None: that of the pages, which hold no codes then."""
        self._config = config
        self._device = store.layers[0][0].device
        self._dtype = dtype or store.kv_format.dtype
        self._attention = TorchPagedAttention(store, config.windows, dtype=dtype)
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=self._device)

    def plan(self, metadata: AttentionMetadata) -> "TorchStepOps":
        """Prepare masks, groups and rotations; see `Ops`."""
        positions = torch.from_numpy(metadata.positions).to(self._device)
        return TorchStepOps(self._config, self._attention.plan(metadata), self._rope.angles(positions, self._dtype))


class TorchStepOps:
    """One planned step; a `StepOps`."""

    def __init__(self, config: DecoderConfig, attention: StepAttention, angles: tuple[Tensor, Tensor]) -> None:
        self._config = config
        self._attention = attention
        self._angles = angles

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`; over the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        residual.add_(x)
        return self.rms_norm(residual, weight)

    def attend(self, layer_idx: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """See `StepOps`."""
        config = self._config
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = self.rms_norm(query, q_norm), self.rms_norm(key, k_norm)
        query, key = rotate(query, *self._angles), rotate(key, *self._angles)
        return self._attention.attend(layer_idx, query, key, value).flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
