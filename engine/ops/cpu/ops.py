"""The decoder's operations, and its whole layers on packed weights, on the compiled CPU kernels."""

import ctypes
import math
from array import array
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kv_cache import TorchKvStore
from engine.model.config import DecoderConfig
from engine.model.rope import RotaryEmbedding
from engine.model.weights import DecoderWeights, LayerWeights, Projection
from engine.ops.cpu.library import (
    PAGE_FORMATS,
    PLAIN_PAGES,
    Activations,
    CpuKernels,
    Layer,
    PackedLayer,
    PackedWeight,
    Step,
)
from engine.ops.cpu.linear import PackedLinear
from engine.ops.metadata import AttentionMetadata, Ints, SequenceSpan

_HEAD_DIM_MULTIPLE = 32


def can_attend(config: DecoderConfig) -> bool:
    """Whether the kernels take heads of this size: all published sizes from 32 up except 80 are multiples of 32."""
    return config.head_dim % _HEAD_DIM_MULTIPLE == 0


class CpuOps:
    """An `Ops` for pages in host memory."""

    name = "compiled for this CPU"

    def __init__(self, config: DecoderConfig, store: TorchKvStore, kernels: CpuKernels) -> None:
        self._config = config
        self._store = store
        self.kernels = kernels
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=torch.device("cpu"))
        self._layers = [
            Layer(
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                window=window or 0,
                page_format=PAGE_FORMATS.get(store.kv_format.name, PLAIN_PAGES),
            )
            for (keys, values), window in zip(store.layers, config.windows, strict=True)
        ]

    def plan(self, metadata: AttentionMetadata) -> "CpuStepOps":
        """Prepare a step; see `Ops`. Kernels read the sequences' own block tables."""
        self.kernels.use_threads(torch.get_num_threads())  # for the first step on this thread
        return CpuStepOps(self._config, self.kernels, self._layers, _PlannedStep(metadata, self._config, self._rope))


class _PlannedStep:
    """The kernels' view of a step, and the memory that it points to."""

    def __init__(self, metadata: AttentionMetadata, config: DecoderConfig, rope: RotaryEmbedding) -> None:
        cos, sin = rope.half_angles(torch.from_numpy(metadata.positions))
        copies: list[array[int]] = []
        tables = np.array([_table_address(span, copies) for span in metadata.spans], dtype=np.int64)
        self._alive = (metadata, cos, sin, copies, tables)
        self.struct = Step(
            num_tokens=len(metadata.positions),
            num_seqs=len(metadata.spans),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=metadata.block_size,
            slot_mapping=metadata.slot_mapping.ctypes.data,
            mirror_start_loc=_data(metadata.mirror_start_loc),
            mirror_slots=_data(metadata.mirror_slots),
            query_start_loc=metadata.query_start_loc.ctypes.data,
            context_lens=metadata.context_lens.ctypes.data,
            block_tables=tables.ctypes.data,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            scale=config.head_dim**-0.5 * math.log2(math.e),
            norm_eps=config.rms_norm_eps,
        )


def _data(numbers: Ints | None) -> int | None:
    return None if numbers is None else numbers.ctypes.data


class CpuStepOps:
    """One planned step; a `StepOps`. Inputs are contiguous."""

    def __init__(self, config: DecoderConfig, kernels: CpuKernels, layers: Seq[Layer], planned: _PlannedStep) -> None:
        self._config = config
        self._kernels = kernels
        self._layers = layers
        self._planned = planned
        self.address = ctypes.byref(planned.struct)
        """Address of the step, for kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        normed = torch.empty_like(x)
        self._kernels.rms_norm(x.data_ptr(), weight.data_ptr(), normed.data_ptr(), *x.shape, self._config.rms_norm_eps)
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`; also mutates x, which becomes the result."""
        at = x.data_ptr()
        self._kernels.add_rms_norm(at, residual.data_ptr(), weight.data_ptr(), at, *x.shape, self._config.rms_norm_eps)
        return x

    def attend(self, layer_idx: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """See `StepOps`; mutates qkv."""
        pages = self.pages(layer_idx, q_norm, k_norm)
        attended = torch.empty((qkv.shape[0], self._config.num_heads * self._config.head_dim), dtype=qkv.dtype)
        self._kernels.attend(self.address, pages, qkv.data_ptr(), attended.data_ptr())
        return attended

    def pages(self, layer_idx: int, q_norm: Tensor | None, k_norm: Tensor | None) -> Any:
        """Return the address of a layer's pages and norms, for kernels."""
        layer = self._layers[layer_idx]
        layer.q_norm = None if q_norm is None else q_norm.data_ptr()
        layer.k_norm = None if k_norm is None else k_norm.data_ptr()
        return ctypes.byref(layer)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        expanded = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        self._kernels.silu_mul(gate_up.data_ptr(), expanded.data_ptr(), num_tokens, width)
        return expanded


def _table_address(span: SequenceSpan, copies: "list[array[int]]") -> int:
    """Return the address of a block table's int32 entries; other kinds of tables are first copied into `copies`."""
    table = span.block_table
    if not (isinstance(table, array) and table.typecode == "i"):
        table = array("i", table)
        copies.append(table)
    return table.buffer_info()[0]


class CpuDecoder:
    """`engine.model.decoder.Decoder` with all projections packed: the same kernels in the same order."""

    is_row_independent = True
    """Each kernel adds up a row in one order, whatever the other rows."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: CpuKernels) -> None:
        """Take weights whose projections are all packed by `kernels`."""
        assert isinstance(weights.head, PackedLinear), f"{weights.head} is not packed"
        self._config = config
        self._weights = weights
        self._head = weights.head
        self.kernels = kernels
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = [
            _packed_layer(layer, next_norm) for layer, next_norm in zip(weights.layers, next_norms, strict=True)
        ]

    def forward(self, token_ids: Tensor, step: CpuStepOps) -> Tensor:
        """Return final hidden states [num_tokens, hidden_size], normalised, for int64 token ids [num_tokens].

        Writes the tokens' keys and values to the pages that `step` was planned for.
        """
        return self.forward_tapped(token_ids, step, ())[0]

    def forward_tapped(self, token_ids: Tensor, step: CpuStepOps, layers: Seq[int]) -> tuple[Tensor, list[Tensor]]:
        """As `forward`; also returns copies of the residual stream [num_tokens, hidden_size] before some layers.

        The layer behind the last one stands for the stream at the end.
        """
        weights, config = self._weights, self._config
        tapped: dict[int, Tensor] = {}
        residual = F.embedding(token_ids, weights.embedding)
        normed = step.rms_norm(residual, weights.layers[0].input_norm)
        attended_size = config.num_heads * config.head_dim
        qkv_size = attended_size + 2 * config.num_kv_heads * config.head_dim
        sizes = (config.hidden_size, qkv_size, attended_size, 2 * config.intermediate_size, config.intermediate_size)
        scratch = [torch.empty((len(token_ids), size), dtype=residual.dtype) for size in sizes]
        activations = Activations(residual.data_ptr(), normed.data_ptr(), *(each.data_ptr() for each in scratch))
        to = ctypes.byref(activations)
        for layer_idx, (layer, packed) in enumerate(zip(weights.layers, self._layers, strict=True)):
            if layer_idx in layers:
                tapped[layer_idx] = residual.clone()
            pages = step.pages(layer_idx, layer.q_norm, layer.k_norm)
            self.kernels.run_layer(step.address, pages, ctypes.byref(packed), to)
        if len(self._layers) in layers:
            tapped[len(self._layers)] = residual
        return normed, [tapped[layer_idx] for layer_idx in layers]

    @property
    def embedding(self) -> Tensor:
        """Embeddings [vocab_size, hidden_size]."""
        return self._weights.embedding

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self._config.hidden_size

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
