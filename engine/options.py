"""Options of one worker's engine, from serving.yaml, and the description of a model, from its checkpoint."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from common.text_files import load_eos_token_id
from engine.device.memory import MemoryShare
from engine.kv_store import KvShape
from engine.model.checkpoints.checkpoint import is_gguf, quantized_by, read_config
from engine.model.checkpoints.formats import WeightFormat
from engine.model.checkpoints.quantization_config import read_weight_format
from engine.model.loader import kv_fingerprint, weight_files
from engine.pages.kv_cache import kv_shape, num_blocks_for_budget, windowed_layers
from engine.pages.kv_format import KvDtype, check_kv_format, kv_format, page_format
from engine.weights.config import (
    DecoderConfig,
    TransformersConfig,
    UnsupportedModel,
    for_length,
    is_native,
    parse_config,
    read_json,
)
from engine.weights.expert_stacks import check_experts
from engine.weights.precision import dtype_name, resolve_device, resolve_dtype
from engine.weights.quantize import QuantizationMethod, check_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One worker's engine, as configured."""

    model_dir: Path
    """Checkpoint folder: config.json and safetensors files, or a GGUF file."""
    model_name: str
    dtype: str = "auto"
    """Dtype of weights and activations; "auto" is resolved when the device is known."""
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    """Number of pages; None: as many as fit in `kv_memory_bytes`."""
    kv_memory_bytes: int | None = None
    """None: this process's share of the free memory, measured when the weights are loaded."""
    memory_share: MemoryShare = MemoryShare()  # noqa: RUF009 - frozen
    max_model_len: int | None = None
    """Limit below that of the checkpoint."""
    max_step_tokens: int = 8192
    max_running: int = 256
    quantization: QuantizationMethod | None = None
    kv_dtype: KvDtype = "auto"
    kernels: Literal["auto", "torch", "cudnn", "compile"] = "auto"
    """"torch": no compiled kernels on a CPU, even where they are available. "cudnn": attends to prompts on a GPU.
    "compile": vLLM's runner under `torch.compile`."""
    may_have_window_pages: bool = True
    """Whether layers with a window may have pages of their own. They need the engine's bookkeeping."""
    tensor_parallel: int = 1
    """Ranks: processes with a part of the weights each."""

    def num_pages(self, shape: KvShape, measure: Callable[[], int]) -> int:
        """Return the configured number of pages, else as many as fit into the configured bytes or those measured."""
        if self.num_blocks is not None:
            return self.num_blocks
        kv_bytes = measure() if self.kv_memory_bytes is None else self.kv_memory_bytes
        return num_blocks_for_budget(kv_bytes, shape, max_step_tokens=self.max_step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Facts about a model apart from its decoder."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    is_float32: bool = False
    """Whether weights, activations and pages are plain float32: sums in another order decide next to no tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model before its weights are read: nothing is "auto" any more."""

    config: DecoderConfig | TransformersConfig
    files: tuple[Path, ...]
    """Safetensors files, a GGUF file, or the seed file of random weights."""
    weight_format: WeightFormat | None
    """Format of the checkpoint's quantized weights; None: all are plain."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of weights and activations."""
    shape: KvShape
    info: CheckpointInfo

    @classmethod
    def read(cls, options: EngineOptions, *, may_have_window_pages: bool = False) -> "ModelDescription":
        """Read the configuration and choose device and formats. Raises UnsupportedModel, naming what is unsupported.

        `may_have_window_pages`: whether layers with a window may have pages of their own.
        """
        files = weight_files(options.model_dir)
        raw = read_config(options.model_dir, files)
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, device, raw)
        config: DecoderConfig | TransformersConfig
        weight_format = None
        if is_native(raw, device.type):
            config = parse_config(raw)
            config = for_length(config, _max_model_len(config, options))
            weight_format = _read_weight_format(raw, files, options)
            if device.type == "cuda" and config.nope is not None:
                raise UnsupportedModel(
                    "layers without rotary embedding, and those that see chunks of a text, are computed on CPUs only;"
                    " set model.device: cpu or model.engine: vllm"
                )
            check_experts(config, options.quantization or quantized_by(files, weight_format), device=device)
            check_quantization(options.quantization, config, device=device)
            check_kv_format(kv_format(options.kv_dtype, dtype), config, block_size=options.block_size, device=device)
        else:
            config = _read_foreign(options, dtype)
        windowed = windowed_layers(config, _max_model_len(config, options)) if may_have_window_pages else None
        if config.recurrent is not None and windowed is None:
            raise UnsupportedModel("recurrent layers are computed on CPUs only, and not in draft models")
        pages = page_format(options.kv_dtype, dtype, config, block_size=options.block_size, device=device)
        quantization = _quantization(options, weight_format, files, device)
        fingerprint = kv_fingerprint(
            config,
            files,
            dtype=dtype_name(dtype),
            block_size=options.block_size,
            quantization=quantization,
            kv_dtype=pages.name,
        )
        shape = kv_shape(
            config,
            block_size=options.block_size,
            dtype=dtype,
            kv_dtype=pages,
            fingerprint=fingerprint,
            windowed=windowed,
        )
        info = CheckpointInfo(
            name=options.model_name,
            vocab_size=config.vocab_size,
            max_model_len=_max_model_len(config, options),
            eos_token_ids=eos_token_ids(options.model_dir, raw),
            is_float32=dtype is torch.float32 and quantization is None and not pages.has_codes,
        )
        return cls(
            config=config,
            files=files,
            weight_format=weight_format,
            device=device,
            dtype=dtype,
            shape=shape,
            info=info,
        )


def _max_model_len(config: DecoderConfig | TransformersConfig, options: EngineOptions) -> int:
    """Return the length of the longest text. Raises UnsupportedModel when a longer one is asked for."""
    limit, asked = config.max_position_embeddings, options.max_model_len
    if asked is not None and asked > limit:
        raise UnsupportedModel(
            f"cannot serve {asked} tokens: {options.model_name} takes {limit}; lower it, or stretch its positions by"
            " rope_scaling in config.json",
            key="model.max_model_len",
        )
    return asked or limit


def _read_weight_format(raw: dict[str, Any], files: tuple[Path, ...], options: EngineOptions) -> WeightFormat | None:
    """Return the format of safetensors files. Raises UnsupportedModel when options ask for another quantization."""
    weight_format = None if is_gguf(files) else read_weight_format(raw)
    if options.quantization is not None and (method := quantized_by(files, weight_format)):
        raise UnsupportedModel(
            f"cannot apply quantization: {options.quantization}: the checkpoint's weights are quantized already, by"
            f" {method}; leave model.quantization out"
        )
    return weight_format


def _quantization(
    options: EngineOptions, weight_format: WeightFormat | None, files: tuple[Path, ...], device: torch.device
) -> str | None:
    """Return the name of the weights' grid and of its arithmetic, for the fingerprint; None for plain weights.

    A CPU rounds the inputs of grouped weights to 8 bits, a GPU does not: their KV differs.
    """
    method = options.quantization or quantized_by(files, weight_format)
    return None if method is None else f"{weight_format or method} on {device.type}"


def _read_foreign(options: EngineOptions, dtype: torch.dtype) -> TransformersConfig:
    """Return the configuration of an architecture that transformers computes."""
    if options.quantization is not None or options.kv_dtype != "auto":
        raise UnsupportedModel("quantization and kv_dtype are for native architectures; transformers computes this one")
    from engine.model.transformers_trial import read_transformers_config  # seconds, which native models save

    return read_transformers_config(options.model_dir, dtype=dtype)


def eos_token_ids(model_dir: Path, raw_config: dict[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: those of the model's, of its recommended and of its tokenizer's files.

    Fine-tuned checkpoints often have the new end in one of them alone.
    """
    path = model_dir / "generation_config.json"
    recommended = read_json(path) if path.is_file() else {}
    inner = raw_config.get("text_config") or {}
    vocab_size = raw_config.get("vocab_size") or inner.get("vocab_size")
    given: list[Any] = [load_eos_token_id(model_dir)]
    for each in (recommended, raw_config, inner):
        found = each.get("eos_token_id")
        given += found if isinstance(found, list) else [found]
    # Some files name -1 for none, or a token that the weights do not have.
    return frozenset(each for each in given if isinstance(each, int) and 0 <= each < (vocab_size or math.inf))
