"""Makes an executor from options: loads a model, and chooses kernels for the model and the machine.

native architecture, CPU     ModelExecutor: our decoder on compiled kernels, else on torch's
native architecture, CUDA    CudaExecutor (`engine.cuda.loading`)
any other architecture       ModelExecutor: transformers computes, on our pages
"""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from engine.device.memory import NoRoomForPages, host_kv_bytes, measure_host
from engine.draft_layer import LayerExecutor
from engine.executor import Executor
from engine.kv_store import has_windows
from engine.model.decoder import Decoder
from engine.model.eagle_checkpoint import DraftedModel, mtp_bytes, read_eagle, read_mtp
from engine.model.floors import measure_floors
from engine.model.loader import load_weights
from engine.ops.cpu.draw import compiled_draw
from engine.ops.cpu.linear import DepthParts, packer
from engine.ops.cpu.ops import CpuDecoder, CpuOps, can_attend, can_run
from engine.ops.interface import StepOps
from engine.ops.select import choose_cpu_kernels, load_cpu_kernels, load_draw_kernel, quantize_and_pack
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore, kv_shape, num_blocks_for_budget
from engine.pages.window_pages import num_pages_beside
from engine.ranks.leader import LeadingRank
from engine.runner import KeptStates, ModelExecutor
from engine.speculation.eagle import MAX_STATES, EagleDrafter
from engine.speculation.heads import HeadsDrafter
from engine.weights.config import DecoderConfig, TransformersConfig, UnsupportedModel
from engine.weights.heads import DraftHeads
from engine.weights.precision import dtype_name, resolve_device
from engine.weights.segments import check_ranks, num_segments

__all__ = ["load_draft_heads", "load_draft_layer", "load_executor", "mtp_bytes"]

logger = logging.getLogger(__name__)


def load_executor(options: EngineOptions) -> Executor:
    """Return an executor; takes seconds and logs its choices.

    Raises UnsupportedModel, or NoRoomForPages when the pages do not fit into memory.
    """
    started_s = time.monotonic()
    may_have_window_pages = options.may_have_window_pages and resolve_device(options.device).type == "cpu"
    model = ModelDescription.read(options, may_have_window_pages=may_have_window_pages)
    _check_fixed_pages(model, options)
    native = None if isinstance(model.config, TransformersConfig) else model.config
    is_quantized = options.quantization is not None or model.weight_format is not None
    check_ranks(native, options.tensor_parallel, is_quantized=is_quantized)
    if isinstance(model.config, TransformersConfig):
        executor = _load_foreign(model, model.config, options)
    elif model.device.type == "cpu" and options.tensor_parallel > 1:
        executor = _load_ranks(model, model.config, options)
    elif model.device.type == "cuda":
        from engine.cuda.loading import load_cuda_executor
        from engine.cuda.ranks import load_ranks

        load = load_cuda_executor if options.tensor_parallel == 1 else load_ranks
        executor = load(model, options)
    else:
        executor = _load_native(model, model.config, options)
    _log_loaded(model, executor, time.monotonic() - started_s, num_ranks=options.tensor_parallel)
    return executor


def load_draft_heads(folder: Path, executor: Executor, *, num_branches: int) -> HeadsDrafter:
    """Return a drafter by the heads of a checkpoint, and let the executor give it hidden states.

    `num_branches`: most tokens beside the first head's likeliest. Raises UnsupportedModel.
    """
    if not isinstance(executor, ModelExecutor):
        raise UnsupportedModel(f"cannot draft with heads for {executor.model_name}: it gives no hidden states")
    heads = DraftHeads.read(folder, hidden_size=executor.hidden_size, vocab_size=executor.vocab_size)
    executor.kept_states = KeptStates(num_tokens=1)
    propose = partial(heads.propose, logits=executor.logits_of)
    return HeadsDrafter(propose, num_heads=heads.num_heads, num_branches=num_branches)


def load_draft_layer(
    folder: Path,
    executor: Executor,
    *,
    kind: Literal["eagle", "mtp"],
    kv_bytes: int,
    is_coupled: bool,
    num_branches: int,
) -> EagleDrafter:
    """Return a drafter by the draft layer of a checkpoint, and let the executor give it states.

    `folder`: for `mtp` the model's own checkpoint. `kv_bytes`: memory for the layer's pages. `is_coupled`: drafts share
    the model's noise. `num_branches`: most tokens beside its first choice. Raises UnsupportedModel, or ValueError when
    `kv_bytes` hold no page.
    """
    if not isinstance(executor, ModelExecutor) or not isinstance(executor.model, CpuDecoder):
        raise UnsupportedModel(f"cannot draft with a layer for {executor.model_name}: it gives no states")
    model, shape = executor.model, executor.kv.shape
    drafted = DraftedModel(num_layers=shape.num_layers, embedding=model.embedding, logits=model.logits)
    layer = read_mtp(folder, drafted) if kind == "mtp" else read_eagle(folder, drafted)
    dtype = model.embedding.dtype
    pages = kv_shape(layer.config, block_size=shape.block_size, dtype=dtype, fingerprint="")
    store = TorchKvStore(pages, num_blocks_for_budget(kv_bytes, pages), device=torch.device("cpu"))
    layer.weights.convert_projections(packer(layer.weights.projections().values(), model.kernels))
    executor.kept_states = KeptStates(num_tokens=MAX_STATES, layers=layer.tapped_layers)
    drafting = LayerExecutor(layer, store, CpuOps(layer.config, store, model.kernels), executor)
    return EagleDrafter(drafting, target=executor, is_coupled=is_coupled, num_branches=num_branches)


def _load_native(model: ModelDescription, config: DecoderConfig, options: EngineOptions) -> Executor:
    kernels = load_cpu_kernels(model.dtype) if options.kernels != "torch" else None
    convert = None
    if options.quantization is not None:
        convert = quantize_and_pack(config, options.quantization, kernels, model.device)
    weights = load_weights(
        model.files,
        config,
        dtype=model.dtype,
        device=model.device,
        weight_format=model.weight_format,
        convert=convert,
    )
    weight_bytes = weights.num_bytes
    choice = choose_cpu_kernels(weights, kernels, DepthParts(num_segments=num_segments(config)))
    store = _make_store(model, options)
    ops = choice.bind(config, store)
    draw_kernel = None if kernels is None else compiled_draw(kernels)
    floors = measure_floors(config, model.shape, weight_bytes=weight_bytes, dtype=model.dtype, device=model.device)
    if isinstance(ops, CpuOps) and can_run(weights):
        return ModelExecutor(CpuDecoder(config, weights, ops.kernels), store, ops, model.info, floors, draw_kernel)
    return ModelExecutor[StepOps](Decoder(config, weights), store, ops, model.info, floors, draw_kernel)


def _load_ranks(model: ModelDescription, config: DecoderConfig, options: EngineOptions) -> Executor:
    """Return the executor of the first of several ranks, which have a part of the weights each."""
    has_kernels = options.kernels != "torch" and can_attend(config)
    kernels = load_cpu_kernels(model.dtype) if has_kernels else None
    first = LeadingRank(model, options, kernels)
    try:
        store = _make_store(model, options)
        floors = measure_floors(
            first.part.config,
            replace(model.shape, num_kv_heads=first.part.config.num_kv_heads),  # what a rank reads of pages
            weight_bytes=first.part.weights.num_bytes,
            dtype=model.dtype,
            device=model.device,
        )
        decoder, ops = first.bind(store)
    except BaseException:
        first.close()
        raise
    draw_kernel = None if kernels is None else compiled_draw(kernels)
    return ModelExecutor[Any](decoder, store, ops, model.info, floors, draw_kernel)


def _load_foreign(model: ModelDescription, config: TransformersConfig, options: EngineOptions) -> Executor:
    from engine.model.transformers_decoder import TransformersOps
    from engine.model.transformers_loader import load_transformers_decoder

    decoder = load_transformers_decoder(options.model_dir, config, dtype=model.dtype, device=model.device)
    store = _make_store(model, options)
    draw_kernel = load_draw_kernel(model.device) if options.kernels != "torch" else None
    return ModelExecutor(decoder, store, TransformersOps(config, store), model.info, draw_kernel=draw_kernel)


def _make_store(model: ModelDescription, options: EngineOptions) -> TorchKvStore:
    """Return as many pages as configured, or as fit beside the weights, which are loaded already."""
    num_blocks = options.num_pages(model.shape, lambda: host_kv_bytes(measure_host(), options.memory_share))
    num_window_pages = num_pages_beside(num_blocks, model.shape, options.max_step_tokens)
    return TorchKvStore(model.shape, num_blocks, device=model.device, num_window_pages=num_window_pages)


def _check_fixed_pages(model: ModelDescription, options: EngineOptions) -> None:
    """Raise NoRoomForPages for a configured size that does not fit: the system would grant it and kill us later."""
    if model.device.type != "cpu":
        return
    kv_bytes = options.kv_memory_bytes or 0
    if options.num_blocks is not None:
        shape, num_blocks = model.shape, options.num_blocks
        num_window_pages = num_pages_beside(num_blocks, shape, options.max_step_tokens)
        kv_bytes = num_blocks * shape.block_bytes + num_window_pages * shape.window_page_bytes
    available = measure_host().available_bytes
    if kv_bytes > available:
        gib = 1 << 30
        raise NoRoomForPages(
            f"{kv_bytes / gib:.1f} GiB of KV pages do not fit into the {available / gib:.1f} GiB of memory that are"
            " available: lower kv_memory_gib or num_blocks"
        )


def _log_loaded(model: ModelDescription, executor: Executor, load_s: float, *, num_ranks: int) -> None:
    shape, num_blocks = model.shape, executor.kv.num_blocks
    num_window_pages = executor.kv.num_window_pages if has_windows(executor.kv) else 0
    logger.info(
        "model loaded",
        extra={
            "model": model.info.name,
            "device": str(model.device),
            "dtype": dtype_name(model.dtype),
            "kv_dtype": shape.dtype,
            "num_layers": shape.num_layers,
            "max_model_len": model.info.max_model_len,
            "kv_bytes_per_token": shape.bytes_per_token,
            "kv_bytes": num_blocks * shape.block_bytes + num_window_pages * shape.window_page_bytes,
            "num_blocks": num_blocks,
            "num_window_pages": num_window_pages,
            "block_size": shape.block_size,
            "num_kv_tokens": num_blocks * shape.block_size,
            "num_ranks": num_ranks,
            "torch_threads": torch.get_num_threads(),
            "load_s": round(load_s, 3),
        },
    )
