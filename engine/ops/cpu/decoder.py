"""The forward pass on packed weights, with one call per layer."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import DecoderConfig
from engine.model.weights import DecoderWeights, LayerWeights, Projection
from engine.ops.cpu.library import Activations, CpuKernels, PackedLayer, PackedWeight
from engine.ops.cpu.linear import PackedLinear
from engine.ops.cpu.ops import CpuStepOps


class CpuDecoder:
    """`engine.model.decoder.Decoder` with all projections packed: the same kernels in the same order."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: CpuKernels) -> None:
        """Take weights whose projections are all packed by `kernels`."""
        assert isinstance(weights.head, PackedLinear), f"{weights.head} is not packed"
        self._config = config
        self._weights = weights
        self._head = weights.head
        self._kernels = kernels
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = [
            _packed_layer(layer, next_norm) for layer, next_norm in zip(weights.layers, next_norms, strict=True)
        ]

    def forward(self, token_ids: Tensor, step: CpuStepOps) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised, for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `step` was planned for.
        """
        weights, config = self._weights, self._config
        residual = F.embedding(token_ids, weights.embedding)
        normed = step.rms_norm(residual, weights.layers[0].input_norm)
        attended_size = config.num_heads * config.head_dim
        qkv_size = attended_size + 2 * config.num_kv_heads * config.head_dim
        sizes = (config.hidden_size, qkv_size, attended_size, 2 * config.intermediate_size, config.intermediate_size)
        scratch = [torch.empty((len(token_ids), size), dtype=residual.dtype) for size in sizes]
        activations = Activations(residual.data_ptr(), normed.data_ptr(), *(each.data_ptr() for each in scratch))
        to = ctypes.byref(activations)
        for layer_idx, (layer, packed) in enumerate(zip(weights.layers, self._layers, strict=True)):
            pages = step.pages(layer_idx, layer.q_norm, layer.k_norm)
            self._kernels.run_layer(step.address, pages, ctypes.byref(packed), to)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size] for rows of `forward`'s result."""
        return self._head.wide(hidden)


def can_run(weights: DecoderWeights) -> bool:
    """Whether every projection is packed; else `Decoder` calls them one by one."""
    layers = weights.layers
    projections = [p for layer in layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return all(isinstance(projection, PackedLinear) for projection in (*projections, weights.head))


def _packed_layer(layer: LayerWeights, next_norm: Tensor) -> PackedLayer:
    return PackedLayer(
        qkv=_address(layer.qkv),
        output=_address(layer.output),
        gate_up=_address(layer.gate_up),
        down=_address(layer.down),
        post_attention_norm=layer.post_attention_norm.data_ptr(),
        next_norm=next_norm.data_ptr(),
    )


def _address(projection: Projection) -> PackedWeight:
    assert isinstance(projection, PackedLinear), f"{projection} is not packed"
    return projection.address
