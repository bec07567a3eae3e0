"""Makes a `CudaExecutor`: weights, kernels, pages in the remaining memory, graphs."""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.sampling import MAX_LOGPROBS, MAX_N, SamplingParams
from engine.cuda.executor import CudaExecutor, StepLimits
from engine.cuda.graphs import DeviceOps, decode_sizes
from engine.cuda.portable import PortableOps
from engine.device.devices import MeasuredMemory, device_for
from engine.device.memory import MemoryShare, NoRoomForPages, device_free_bytes
from engine.kv_store import KvShape
from engine.model.checkpoints.checkpoint import quantized_by
from engine.model.decoder import Decoder
from engine.model.floors import measure_floors
from engine.model.loader import load_stacked_weights
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_kernels.step import DeviceStep
from engine.options import CheckpointInfo, EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.sampling.device_draw import draw_on_device
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler
from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.layout import all_projections
from engine.weights.precision import dtype_name
from engine.weights.quantize import QuantizationMethod, kv_scales, quantizer, widen_weights
from engine.work import StepFloors

logger = logging.getLogger(__name__)

ExecutorT = TypeVar("ExecutorT", bound=CudaExecutor)

_MAX_GRAPH_SEQS = 256
_GIB = 1 << 30
# Share of a step's memory for gaps between the allocator's blocks.
_STEP_SLACK = 0.2
# Reserve for kernels that are loaded late, libraries' workspaces, and other processes.
_RESERVE_SHARE = 0.02
_MIN_RESERVE_BYTES = _GIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder on its device, and the shape of its pages."""

    decoder: Decoder
    info: CheckpointInfo
    shape: KvShape
    device: torch.device
    dtype: torch.dtype
    """Dtype of weights and activations."""
    kv_scales: Seq[tuple[float, float]] | None = None
    """Scales of each layer's keys and values, for pages of 8-bit numbers."""
    floors: StepFloors | None = None
    uses_cudnn: bool = False
    """Whether cuDNN computes the attention of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """The scheduler's bounds of a step."""

    max_step_tokens: int
    max_running: int

    @property
    def max_seqs(self) -> int:
        """Maximum number of sequences: a lone prompt may have more samples than `max_running`."""
        return max(self.max_running, MAX_N)


def load_cuda_executor(model: ModelDescription, options: EngineOptions) -> CudaExecutor:
    """Return an executor for a model of a native architecture; takes seconds.

    Without `num_blocks` and `kv_memory_bytes`, pages fill this process's share of the device. Raises UnsupportedModel
    when the weights do not fit, and ValueError when no page does.
    """
    assert isinstance(model.config, DecoderConfig), "transformers' architectures have a ModelExecutor"
    free_bytes = device_free_bytes(device_for(model.device).memory(), options.memory_share)
    check_weights_fit(model, options.quantization, free_bytes)
    convert = None
    if options.quantization is not None:
        convert = quantizer(model.config, options.quantization, device=model.device)
    weights = load_stacked_weights(
        model.files,
        model.config,
        dtype=model.dtype,
        device=model.device,
        weight_format=model.weight_format,
        convert=convert,
    )
    scales = kv_scales(weights, model.config) if options.kv_dtype == "fp8" else None
    widen_weights(weights, lambda linear, _span: linear)
    loaded = LoadedModel(
        decoder=Decoder(model.config, weights),
        info=model.info,
        shape=model.shape,
        device=model.device,
        dtype=model.dtype,
        kv_scales=scales,
        floors=measure_floors(
            model.config, model.shape, weight_bytes=weights.num_bytes, dtype=model.dtype, device=model.device
        ),
        uses_cudnn=options.kernels == "cudnn",
    )
    bounds = StepBounds(max_step_tokens=options.max_step_tokens, max_running=options.max_running)
    num_blocks = options.num_pages(model.shape, lambda: measure_kv_bytes(loaded, bounds, options.memory_share))
    return make_cuda_executor(loaded, num_blocks, bounds, CudaExecutor)


def check_weights_fit(model: ModelDescription, quantization: QuantizationMethod | None, free_bytes: int) -> None:
    """Raise UnsupportedModel, with their size, for weights that are larger than this worker's part of the device.

    Else they would be read for minutes, and end in a lack of memory: those in 4 bits, too, which no kernel here takes.
    """
    config, dtype = model.config, dtype_name(model.dtype)
    assert isinstance(config, DecoderConfig), "transformers loads its own"
    num_projected = sum(each.out_features * each.in_features for each in all_projections(config))
    num_embedded = config.vocab_size * config.hidden_size * (1 if config.has_tied_embeddings else 2)
    projected_bytes = num_projected * (1 if quantization is not None else model.dtype.itemsize)
    needed_bytes = projected_bytes + num_embedded * model.dtype.itemsize
    if needed_bytes <= free_bytes:
        return
    method = quantized_by(model.files, model.weight_format)
    form, advice = f"take {needed_bytes / _GIB:.1f} GiB in {quantization or dtype}", "use a smaller model"
    if method is not None:
        form = f"are in {method}, and a GPU takes them widened to {dtype}: {needed_bytes / _GIB:.1f} GiB"
        advice = "use a plain checkpoint with model.quantization: fp8"
    elif quantization is None and config.experts is None:
        advice = "set model.quantization: fp8"
    raise UnsupportedModel(
        f"cannot load {model.info.name}: its weights {form}, and {free_bytes / _GIB:.1f} GiB of the device are free for"
        f" this worker; {advice}"
    )


def make_cuda_executor(model: LoadedModel, num_blocks: int, bounds: StepBounds, kind: type[ExecutorT]) -> ExecutorT:
    """Return an executor with `num_blocks` pages, compiled kernels and captured graphs."""
    started_s = time.monotonic()
    store = TorchKvStore(model.shape, num_blocks, device=model.device, is_like_device=True)
    ops = make_device_ops(model, store)
    limits = StepLimits(max_seqs=bounds.max_seqs, max_graph_seqs=min(bounds.max_running, _MAX_GRAPH_SEQS))
    executor = kind(model.decoder, store, ops, model.info, limits, model.floors)
    executor.warm_up()
    logger.info(
        "device executor ready",
        extra={
            "model": model.info.name,
            "kernels": ops.name,
            "warm_up_s": round(time.monotonic() - started_s, 3),
        },
    )
    return executor


def make_device_ops(model: LoadedModel, store: TorchKvStore) -> DeviceOps:
    """Return the kernels for a device: Triton's on CUDA, torch's elsewhere and when Triton is not installed."""
    config = model.decoder.config
    if model.device.type == "cuda":
        try:
            from engine.ops.triton_kernels.ops import TritonOps
        except ImportError as error:
            logger.warning("cannot import Triton's kernels; torch's are slow on a GPU: %s", error)
        else:
            ops = TritonOps(
                config,
                store,
                dtype=model.dtype,
                kv_scales=model.kv_scales,
                max_positions=model.info.max_model_len,
                uses_cudnn=model.uses_cudnn,
            )
            ops.warm_up()
            return ops
    return PortableOps(TorchOps(config, store), block_size=model.shape.block_size)


@torch.inference_mode()
def measure_kv_bytes(model: LoadedModel, bounds: StepBounds, share: MemoryShare) -> int:
    """Return the memory left for pages, measured by running the largest step. Takes seconds. Raises ValueError."""
    store = TorchKvStore(model.shape, 1, device=model.device, is_like_device=True)
    ops = make_device_ops(model, store)
    largest_step = device_for(model.device).measure(lambda: _run_largest_step(model, ops, bounds))
    vocab_size = model.decoder.config.vocab_size
    sizes = decode_sizes(min(bounds.max_seqs, bounds.max_running, _MAX_GRAPH_SEQS))
    # Each graph keeps its logits. They share the memory of the largest graph, which needs less than the largest step.
    graph_bytes = sum(sizes) * vocab_size * torch.float32.itemsize + largest_step.peak_bytes // 4
    return kv_bytes_left(largest_step, share, graph_bytes=graph_bytes)


def _run_largest_step(model: LoadedModel, ops: DeviceOps, bounds: StepBounds) -> None:
    """Run a step with the maximum of tokens and samples, in the most expensive way, on one page."""
    block_size = model.shape.block_size
    spans = largest_spans(
        bounds.max_step_tokens, model.info.max_model_len, block_size=block_size, is_behind_prefix=model.uses_cudnn
    )
    metadata = AttentionMetadata.from_spans(spans, block_size=block_size)
    step = DeviceStep.from_metadata(metadata, tile_tokens=ops.tile_tokens, device=model.device)
    token_ids = torch.zeros(bounds.max_step_tokens, dtype=torch.int64, device=model.device)
    hidden = model.decoder.forward(token_ids, ops.bind(step))
    rows = _dearest_rows(min(bounds.max_seqs, bounds.max_step_tokens))
    sampler = Sampler(
        vocab_size=model.decoder.config.vocab_size, eos_token_ids=model.info.eos_token_ids, draw_kernel=draw_on_device
    )
    sampler.choose(model.decoder.logits(hidden[: len(rows)]), rows)


def largest_spans(
    max_step_tokens: int, max_model_len: int, *, block_size: int, is_behind_prefix: bool
) -> list[SequenceSpan]:
    """Return the spans, all on page 0, of the step whose attention takes the most memory.

    cuDNN's attention gathers keys and values, and behind a prefix adds pieces of it up in float32: with
    `is_behind_prefix` each span ends at `max_model_len`, behind a page at least.
    """
    prefix = min(block_size, max_model_len - 1) if is_behind_prefix else 0
    spans: list[SequenceSpan] = []
    while max_step_tokens > 0:
        num_new = min(max_step_tokens, max_model_len - prefix)
        num_computed = max_model_len - num_new if is_behind_prefix else 0
        table = [0] * -(-(num_computed + num_new) // block_size)
        spans.append(SequenceSpan(num_computed=num_computed, num_new_tokens=num_new, block_table=table))
        max_step_tokens -= num_new
    return spans


def _dearest_rows(num_rows: int) -> Seq[SamplingRow]:
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, num_logprobs=MAX_LOGPROBS)
    row = SamplingRow(params=params, sample_index=0, token_index=0, prompt_token_ids=(0,), output_token_ids=(0,))
    return [row] * num_rows


def kv_bytes_left(largest_step: MeasuredMemory, share: MemoryShare, *, graph_bytes: int) -> int:
    """Return the bytes left for pages when the weights are loaded. Raises ValueError when nothing is left.

        total = weights, other processes │ a step at its largest │ graphs      │ reserve │ pages
                not free                 │ measured              │ graph_bytes │ stated  │ the rest

    Workers that share a card each count their own fraction of it (`engine.device.memory`).
    """
    free_bytes = device_free_bytes(largest_step.device, share)
    reserve_bytes = max(_MIN_RESERVE_BYTES, round(largest_step.device.total_bytes * _RESERVE_SHARE))
    needed_bytes = round(largest_step.peak_bytes * (1 + _STEP_SLACK)) + graph_bytes + reserve_bytes
    if needed_bytes >= free_bytes:
        raise NoRoomForPages(
            f"auto finds no memory for KV pages: of this worker's part of the device"
            f" {free_bytes / _GIB:.1f} GiB are free beside the weights, and steps need {needed_bytes / _GIB:.1f} GiB:"
            " lower max_step_tokens or max_running"
        )
    return free_bytes - needed_bytes
