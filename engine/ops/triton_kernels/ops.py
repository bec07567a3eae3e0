"""The decoder's operations on CUDA; an `Ops`."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.ops.metadata import AttentionMetadata
from engine.ops.triton_kernels.cudnn_attention import cudnn_attention
from engine.ops.triton_kernels.decode_attention import decode_attention, split_keys
from engine.ops.triton_kernels.elementwise import (
    add_rms_norm,
    add_rms_norm_fp8,
    gate_mul,
    gate_mul_fp8,
    rms_norm,
    rms_norm_fp8,
)
from engine.ops.triton_kernels.key_splits import KeySplits
from engine.ops.triton_kernels.latent_attention import (
    latent_tile_tokens,
    split_latent_keys,
)
from engine.ops.triton_kernels.latent_ops import LatentLayer, attend_latent, latent_trial
from engine.ops.triton_kernels.latent_rows import LatentPages
from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.prefill_attention import prefill_attention, tile_tokens
from engine.ops.triton_kernels.rope_kv_write import HeadNorms, rope_kv_write, rotation_table
from engine.ops.triton_kernels.step import Chunk, DeviceStep
from engine.pages.kv_cache import TorchKvStore
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import LatentWeights
from engine.weights.quantize import Fp8Rows
from engine.weights.rope import layer_ropes

_INTERPRETED_SMS = 4
"""Multiprocessors assumed without a device: small batches get one split per sequence, single sequences several."""
_WARM_UP_TOKENS = 65


class TritonOps:
    """Kernels for one model on one device, bound to its pages. Engine thread only.

    Weights and activations have `dtype` (default: the pages'). Pages may be float8_e4m3fn instead. `kv_scales` are the
    factors of each layer's stored keys and values (default: 1). Positions must be below `max_positions` (default: the
    model's); each costs 4 * head_dim bytes, twice where layers with a window have frequencies of their own.
    `uses_cudnn`: for the attention of chunks over keys and values. Raises ValueError for a model that the kernels do
    not take.
    """

    name = "triton"

    def __init__(
        self,
        config: DecoderConfig,
        store: TorchKvStore,
        *,
        dtype: torch.dtype | None = None,
        kv_scales: Seq[tuple[float, float]] | None = None,
        max_positions: int | None = None,
        uses_cudnn: bool = False,
    ) -> None:
        self._config = config
        self._dtype = dtype or store.layers[0][0].dtype
        self._device = store.layers[0][0].device
        if self._dtype.itemsize == 1:
            raise ValueError("cannot infer the dtype of the activations from float8 pages: pass dtype")
        self._num_sms = _count_sms(self._device)
        self._attend_chunks = cudnn_attention if uses_cudnn else prefill_attention
        assert config.nope is None and config.recurrent is None, f"{config} is refused on GPUs"
        self._pages: tuple[LayerPages | LatentPages, ...]
        if config.latent is None:
            self._tile_tokens = tile_tokens(self._dtype, config.head_dim, config.num_heads // config.num_kv_heads)
            self._pages = tuple(_layer_pages(config, store, kv_scales))
        else:
            self._tile_tokens = latent_tile_tokens(self._dtype, config.num_heads)
            rank, scale = config.latent.rank, config.score_scale
            self._pages = tuple(LatentPages(rows=rows, rank=rank, score_scale=scale) for (rows,) in store.layers)
        num_positions = max_positions or config.max_position_embeddings
        ropes = layer_ropes(config, self._device)
        tables = {rope: rotation_table(rope, num_positions, device=self._device) for rope in set(ropes)}
        self._rotations = tuple(tables[rope] for rope in ropes)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile in `DeviceStep.prefill_tiles`."""
        return self._tile_tokens

    def plan(self, metadata: AttentionMetadata) -> "TritonStepOps":
        """Copy a step's description to the device without waiting; see `Ops`."""
        return self.bind(DeviceStep.from_metadata(metadata, tile_tokens=self._tile_tokens, device=self._device))

    def bind(self, step: DeviceStep) -> "TritonStepOps":
        """Return the operations on `step`'s tensors, which may be refilled between runs.

        Launches depend only on the tensors' shapes, so that a CUDA graph can capture them; the result owns the memory
        of partial results and must live while the graph does.
        """
        pages, num_heads = self._pages[0], self._config.num_heads
        if isinstance(pages, LatentPages):
            splits = split_latent_keys(step.num_decodes, num_heads, pages, num_sms=self._num_sms)
        else:
            splits = split_keys(step.num_decodes, num_heads, pages, num_sms=self._num_sms)
        return TritonStepOps(self._config, self._pages, self._rotations, step, splits, self._attend_chunks)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile every kernel that a step can need; takes seconds, unless they are cached on disk.

        Runs padding, which mutates no page: a batch of decodes, and one with a chunk too.
        """
        config = self._config
        norm = torch.ones(config.hidden_size, device=self._device)
        # Layers with the same window share a kernel.
        layers = {window: i for i, window in enumerate(config.windows)}.values()
        for step in _padding_steps(self._tile_tokens, self._pages[0].block_size, self._device):
            ops, num_tokens = self.bind(step), len(step.positions)
            hidden = torch.zeros((num_tokens, config.hidden_size), dtype=self._dtype, device=self._device)
            ops.rms_norm(hidden, norm)
            ops.add_rms_norm(hidden, hidden.clone(), norm)
            for size in config.gated_sizes:
                ops.gate_mul(hidden.new_zeros((num_tokens, 2 * size)))
            for layer_idx in layers:
                self._warm_up_attention(ops, layer_idx, hidden)

    def _warm_up_attention(self, ops: "TritonStepOps", layer_idx: int, hidden: Tensor) -> None:
        config = self._config
        if config.latent is not None:
            ops.attend_latent(layer_idx, *latent_trial(config, config.latent, hidden))
            return
        head_norm = torch.ones(config.head_dim, device=self._device) if config.has_qk_norm else None
        sinks = hidden.new_zeros(config.num_heads) if config.has_sinks else None
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        qkv = hidden.new_zeros((len(hidden), num_all_heads * config.head_dim))
        ops.attend(layer_idx, qkv, head_norm, head_norm, sinks)


class TritonStepOps:
    """One step; a `StepOps` and a `LatentStepOps`."""

    def __init__(
        self,
        config: DecoderConfig,
        pages: tuple[LayerPages | LatentPages, ...],
        rotations: tuple[Tensor, ...],
        step: DeviceStep,
        splits: KeySplits,
        attend_chunks: Callable[[Tensor, Tensor, LayerPages, DeviceStep, Tensor | None], None],
    ) -> None:
        self._config = config
        self._eps = config.rms_norm_eps
        self._activation = config.activation
        self._pages = pages
        self._rotations = rotations
        self._step = step
        self._splits = splits
        self._attend_chunks = attend_chunks

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        return rms_norm(x, weight, self._eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        return add_rms_norm(x, residual, weight, self._eps)

    def attend(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `StepOps`."""
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = HeadNorms(query=q_norm, key=k_norm, eps=self._eps)
        pages = self._pages[layer_idx]
        assert isinstance(pages, LayerPages), f"{pages} hold no keys"
        heads = qkv.view(len(qkv), -1, self._config.head_dim)
        query = rope_kv_write(heads, norms, self._rotations[layer_idx], pages, self._step)
        output = torch.empty_like(query)
        if self._step.num_decodes:
            decode_attention(output, query, pages, self._step, self._splits, sinks)
        self._attend_chunks(output, query, pages, self._step, sinks)
        return output.view(len(qkv), -1)

    def attend_latent(self, layer_idx: int, compressed: Tensor, weights: LatentWeights) -> Tensor:
        """See `LatentStepOps`."""
        config, pages = self._config, self._pages[layer_idx]
        assert config.latent is not None and isinstance(pages, LatentPages), f"{pages} hold no latent rows"
        layer = LatentLayer(
            num_heads=config.num_heads, config=config.latent, pages=pages, angles=self._rotations[layer_idx]
        )
        return attend_latent(layer, compressed, weights, self._step, self._splits)

    def gate_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        return gate_mul(gate_up, self._activation)

    def rms_norm_fp8(self, x: Tensor, weight: Tensor) -> Fp8Rows:
        """See `Fp8StepOps`."""
        return rms_norm_fp8(x, weight, self._eps)

    def add_rms_norm_fp8(self, x: Tensor, residual: Tensor, weight: Tensor) -> Fp8Rows:
        """See `Fp8StepOps`."""
        return add_rms_norm_fp8(x, residual, weight, self._eps)

    def gate_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """See `Fp8StepOps`."""
        return gate_mul_fp8(gate_up, self._activation)


def _layer_pages(
    config: DecoderConfig, store: TorchKvStore, kv_scales: Seq[tuple[float, float]] | None
) -> Iterator[LayerPages]:
    scales = kv_scales or [(1.0, 1.0)] * config.num_layers
    for (keys, values), window, (key_scale, value_scale) in zip(store.layers, config.windows, scales, strict=True):
        yield LayerPages(
            keys=keys,
            values=values,
            window=None if window is None else window.num_tokens,
            key_scale=key_scale,
            value_scale=value_scale,
            attention_scale=config.attention_scale,
        )


def _count_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _padding_steps(tile_tokens: int, block_size: int, device: torch.device) -> list[DeviceStep]:
    """Return steps that write no KV: two decodes without context, and one such decode with a chunk in block 0."""

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    decodes = DeviceStep(
        positions=ints(0, 0),
        slot_mapping=ints(-1, -1, dtype=torch.int64),
        context_lens=ints(0, 0),
        block_tables=torch.zeros((2, 1), dtype=torch.int32, device=device),
        query_start_loc=ints(0, 1, 2),
        decode_seqs=None,
        prefill_tiles=None,
    )
    mixed = DeviceStep(
        positions=ints(*[0] * (1 + _WARM_UP_TOKENS)),
        slot_mapping=ints(*[-1] * (1 + _WARM_UP_TOKENS), dtype=torch.int64),
        context_lens=ints(0, _WARM_UP_TOKENS),
        block_tables=torch.zeros((2, -(-_WARM_UP_TOKENS // block_size)), dtype=torch.int32, device=device),
        query_start_loc=ints(0, 1, 1 + _WARM_UP_TOKENS),
        decode_seqs=ints(0),
        prefill_tiles=torch.tensor(
            [(1, first) for first in range(0, _WARM_UP_TOKENS, tile_tokens)], dtype=torch.int32, device=device
        ),
        chunks=(Chunk(seq=1, first_token=1, num_tokens=_WARM_UP_TOKENS, context_len=_WARM_UP_TOKENS),),
    )
    return [decodes, mixed]
