"""The decoder's operations, and its whole layers on packed weights, on the compiled CPU kernels."""

import ctypes
import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.ops.cpu.library import (
    ACTIVATIONS,
    Activations,
    CpuKernels,
    Layer,
    PackedExperts,
    PackedLayer,
    PackedWeight,
    Step,
    page_format,
)
from engine.ops.cpu.linear import PackedLinear
from engine.ops.cpu.recurrent import CpuRecurrence, can_recur
from engine.ops.metadata import AttentionMetadata, Ints, SequenceSpan
from engine.ops.recurrent import StepStates
from engine.ops.torch_ops import apart_from_gates
from engine.pages.kv_cache import TorchKvStore
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import DecoderWeights, LayerWeights, Moe, Projection, RecurrentWeights
from engine.weights.rope import RotaryEmbedding, layer_ropes

_HEAD_DIM_MULTIPLE = 32


def can_attend(config: DecoderConfig) -> bool:
    """Whether the kernels take heads of this size: all published sizes from 32 up except 80 are multiples of 32.

    They read keys and values, no latent rows.
    """
    takes_heads = not any(dim % _HEAD_DIM_MULTIPLE for dim in (config.head_dim, config.rope_dim))
    return takes_heads and config.latent is None and can_recur(config.recurrent)


class CpuOps:
    """An `Ops` for pages in host memory."""

    name = "compiled for this CPU"

    def __init__(
        self, config: DecoderConfig, store: TorchKvStore, kernels: CpuKernels, *, first_page_head: int = 0
    ) -> None:
        """`first_page_head`: first of the pages' heads that the decoder, one of several ranks, has."""
        self._config = config
        self._page_heads = store.shape.num_kv_heads, first_page_head
        self._store = store
        self.kernels = kernels
        self._ropes = layer_ropes(config, torch.device("cpu"))
        self._layers = [
            Layer(
                keys=parts[0].data_ptr(),
                values=parts[-1].data_ptr(),
                window_tokens=0 if window is None else window.num_tokens,
                has_chunks=window is not None and window.is_chunk,
                page_format=page_format(store.kv_format),
            )
            for parts, window in zip(store.layers, config.windows, strict=True)
        ]

        self._windowed = frozenset(store.shape.window_layers)
        self._recurrence = None if config.recurrent is None else CpuRecurrence(config.recurrent, kernels)

    def plan(self, metadata: AttentionMetadata) -> "CpuStepOps":
        """Prepare a step; see `Ops`. Kernels read the sequences' own block tables."""
        self.kernels.use_threads(torch.get_num_threads())  # for the first step on this thread
        planned = on_window_pages = _PlannedStep(metadata, self._config, self._ropes, self._page_heads)
        if self._windowed:
            apart = metadata.on_window_pages(self._store.window_page_of)
            on_window_pages = _PlannedStep(apart, self._config, self._ropes, self._page_heads)
        by_layer = [on_window_pages if i in self._windowed else planned for i in range(self._config.num_layers)]
        recur = None
        if self._recurrence is not None:
            recur = partial(self._recurrence.run, StepStates(metadata, self._store))
        return CpuStepOps(self._config, self.kernels, self._layers, by_layer, recur)


class _PlannedStep:
    """The kernels' view of a step, and the memory that it points to."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        config: DecoderConfig,
        ropes: Seq[RotaryEmbedding],
        page_heads: tuple[int, int],
    ) -> None:
        positions = torch.from_numpy(metadata.positions)
        made = {rope: (*rope.half_angles(positions), rope.query_factors(positions)) for rope in set(ropes)}
        self.rotations = [made[rope] for rope in ropes]
        """Cosines and sines of each layer, and the factors of queries or None."""
        copies: list[array[int]] = []
        tables = np.array([_table_address(span, copies) for span in metadata.spans], dtype=np.int64)
        self._alive = (metadata, copies, tables)
        self.struct = Step(
            num_tokens=len(metadata.positions),
            num_seqs=len(metadata.spans),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_dim=config.rope_dim,
            block_size=metadata.block_size,
            slot_mapping=metadata.slot_mapping.ctypes.data,
            mirror_start_loc=_data(metadata.mirror_start_loc),
            mirror_slots=_data(metadata.mirror_slots),
            query_start_loc=metadata.query_start_loc.ctypes.data,
            context_lens=metadata.context_lens.ctypes.data,
            block_tables=tables.ctypes.data,
            activation=ACTIVATIONS[config.activation],
            scale=config.score_scale * math.log2(math.e),
            norm_eps=config.rms_norm_eps,
            num_page_heads=page_heads[0],
            first_page_head=page_heads[1],
        )


def _data(numbers: Ints | None) -> int | None:
    return None if numbers is None else numbers.ctypes.data


class CpuStepOps:
    """One planned step; a `StepOps` and a `RecurrentStepOps`. Inputs are contiguous."""

    def __init__(
        self,
        config: DecoderConfig,
        kernels: CpuKernels,
        layers: Seq[Layer],
        planned: Seq[_PlannedStep],
        recur: Callable[[Any, int, Tensor, RecurrentWeights], Tensor] | None = None,
    ) -> None:
        """`planned`: the step as each layer sees it; `recur`: of a model with recurrent layers, takes its address."""
        self._config = config
        self._recur = recur
        self._kernels = kernels
        self._layers = layers
        self._planned = planned

    def address(self, layer_idx: int) -> Any:
        """Return the address of the step as a layer sees it, for kernels."""
        return ctypes.byref(self._planned[layer_idx].struct)

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

    def attend(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `StepOps`; mutates qkv."""
        config, pages = self._config, self.pages(layer_idx, q_norm, k_norm, sinks)
        heads, gates = apart_from_gates(config, qkv) if config.has_gated_attention else (qkv, None)
        attended = torch.empty((qkv.shape[0], config.attended_size), dtype=qkv.dtype)
        self._kernels.attend(self.address(layer_idx), pages, heads.data_ptr(), attended.data_ptr())
        if gates is not None:
            self._kernels.gate_heads(attended.data_ptr(), gates.data_ptr(), *attended.shape)
        return attended

    def pages(self, layer_idx: int, q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None) -> Any:
        """Return the address of a layer's pages, norms, sinks and rotations, for kernels."""
        layer = self._layers[layer_idx]
        rotation = self._planned[layer_idx].rotations[layer_idx]
        layer.cos, layer.sin, layer.query_factors = (_address_or_null(each) for each in rotation)
        layer.q_norm, layer.k_norm, layer.sinks = (_address_or_null(each) for each in (q_norm, k_norm, sinks))
        return ctypes.byref(layer)

    def recur(self, layer_idx: int, projected: Tensor, weights: RecurrentWeights) -> Tensor:
        """See `RecurrentStepOps`."""
        assert self._recur is not None, f"{self._config} has no recurrent layers"
        return self._recur(self.address(layer_idx), layer_idx, projected, weights)

    def gate_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // (1 + self._config.has_gates)
        expanded = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        activation = self._planned[0].struct.activation
        self._kernels.gate_mul(activation, gate_up.data_ptr(), expanded.data_ptr(), num_tokens, width)
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
            _packed_layer(layer, next_norm, config.residual_scale)
            for layer, next_norm in zip(weights.layers, next_norms, strict=True)
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
        residual = weights.embed(token_ids)
        normed = step.rms_norm(residual, weights.layers[0].input_norm)
        attended_size = config.num_heads * config.head_dim
        qkv_size = attended_size + 2 * config.num_kv_heads * config.head_dim
        expanded_size = config.largest_intermediate_size
        sizes = (config.hidden_size, qkv_size, attended_size, 2 * expanded_size, expanded_size)
        scratch = [torch.empty((len(token_ids), size), dtype=residual.dtype) for size in sizes]
        activations = Activations(residual.data_ptr(), normed.data_ptr(), *(each.data_ptr() for each in scratch))
        to = ctypes.byref(activations)
        for layer_idx, (layer, packed) in enumerate(zip(weights.layers, self._layers, strict=True)):
            if layer_idx in layers:
                tapped[layer_idx] = residual.clone()
            pages = None
            if layer.recurrent is not None:
                attended = step.recur(layer_idx, layer.qkv(normed), layer.recurrent)
                activations.attended = attended.data_ptr()
            elif config.has_gated_attention:
                attended = step.attend(layer_idx, layer.qkv(normed), layer.q_norm, layer.k_norm, layer.sinks)
                activations.attended = attended.data_ptr()
            else:
                activations.attended = scratch[2].data_ptr()
                pages = step.pages(layer_idx, layer.q_norm, layer.k_norm, layer.sinks)
            self.kernels.run_layer(step.address(layer_idx), pages, ctypes.byref(packed), to)
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
        logits, divisor = self._head.wide(hidden), self._config.logits_divisor
        return logits if divisor == 1 else logits.div_(divisor)


def can_run(weights: DecoderWeights) -> bool:
    """Whether every projection is packed, and experts are chosen by scores alone; else `Decoder` calls one by one."""
    mixtures = [layer.mlp.config for layer in weights.layers if isinstance(layer.mlp, Moe)]
    chooses_by_scores = not any(each.has_score_bias or each.num_group_best or each.scale != 1 for each in mixtures)
    return chooses_by_scores and all(isinstance(projection, PackedLinear) for projection in weights.projections())


def _packed_layer(layer: LayerWeights, next_norm: Tensor, residual_scale: float) -> PackedLayer:
    packed = PackedLayer(
        qkv=_address(layer.qkv),
        output=_address(layer.output),
        post_attention_norm=None if layer.mlp is None else layer.post_attention_norm.data_ptr(),
        next_norm=next_norm.data_ptr(),
        attention_output_norm=_address_or_null(layer.attention_output_norm),
        mlp_output_norm=_address_or_null(layer.mlp_output_norm),
        residual_scale=residual_scale,
    )
    if isinstance(layer.mlp, Moe):
        packed.experts = ctypes.pointer(_packed_experts(layer.mlp))
    elif layer.mlp is not None:
        packed.gate_up, packed.down = _address(layer.mlp.gate_up), _address(layer.mlp.down)
    return packed


def _packed_experts(moe: Moe) -> PackedExperts:
    config, count = moe.config, len(moe.experts)
    addresses = PackedWeight * count
    packed = PackedExperts(
        router=_address(moe.router),
        gate_up=addresses(*(_address(expert.gate_up) for expert in moe.experts)),
        down=addresses(*(_address(expert.down) for expert in moe.experts)),
        num_experts=count,
        num_chosen=config.num_chosen,
        has_normalised_weights=config.has_normalised_weights,
        has_sigmoid_scores=config.has_sigmoid_scores,
        has_weighted_inputs=config.has_weighted_inputs,
        has_shared=config.shared is not None,
    )
    if config.clamped_gate is not None:
        packed.steepness, packed.limit = config.clamped_gate.steepness, config.clamped_gate.limit
    return packed


def _address_or_null(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _address(projection: Projection) -> PackedWeight:
    assert isinstance(projection, PackedLinear), f"{projection} is not packed"
    return projection.address
