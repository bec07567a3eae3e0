"""Starts vLLM's own engine for a worker: its scheduler and its ranks in processes of their own, with our connector.

What vLLM is asked for comes from serving.yaml: the keys that mean the same for every engine, and `model.vllm`, whose
keys are vLLM's engine arguments by their names.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from common.engines import VLLM_PACKAGES, VLLM_VERSION, installed_package, vllm_version
from common.random_models import SEED_FILE
from engine.device.memory import host_kv_bytes, measure_host
from engine.kv_store import KvShape
from engine.model.checkpoints.checkpoint import is_gguf, read_config
from engine.model.loader import content_digest, grammar_library_version, weight_files
from engine.options import CheckpointInfo, EngineOptions, eos_token_ids
from engine.vllm.client import AsyncLlmClient
from engine.vllm.environment import environment_of, preloaded_openmp
from engine.vllm.errands import PageReport, Refusal
from engine.vllm.processes import forget_shared_names
from engine.vllm.running import Pipes, RunningVllm
from engine.vllm.staging import StagedStore
from engine.weights.config import UnsupportedModel
from engine.weights.precision import resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

_STAGING_VERSION = 1
_OURS = (
    *("model", "tokenizer", "skip_tokenizer_init", "block_size", "tensor_parallel_size", "max_num_seqs"),
    *("max_num_batched_tokens", "max_model_len", "dtype", "enable_prefix_caching", "kv_transfer_config"),
    *("kv_events_config", "logits_processors", "generation_config", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
    *("max_logprobs", "logprobs_mode", "data_parallel_size", "disable_log_stats"),
)
"""Arguments that follow from other keys of serving.yaml, or without which nothing can be handed over, or is right."""


def start_vllm(options: EngineOptions, arguments: Mapping[str, Any]) -> RunningVllm:
    """Start vLLM; takes some 20 seconds. Raises UnsupportedModel, naming what cannot be served."""
    started_s = time.monotonic()
    check_vllm()
    files = _check_options(options, arguments)
    os.environ.update(environment_of(options))
    pipes = Pipes.open(options.tensor_parallel)
    raw = read_config(options.model_dir, files)
    with preloaded_openmp(options):
        llm = _start(options, arguments, files, raw, pipes)
    reports = [pipes.take(1 + rank, waits=True) for rank in range(options.tensor_parallel)]
    pipes.seal()
    forget_shared_names()
    if (block_size := llm.vllm_config.cache_config.block_size) != options.block_size:
        raise UnsupportedModel(
            f"pools.*.block_size: {options.block_size}: vLLM takes {block_size} for {options.model_dir} on this device"
        )
    pages = reports[0][0]
    assert isinstance(pages, PageReport), "a rank reports its pages first"
    shape = _shape(options, pages, files)
    kv = StagedStore(shape, pages.num_blocks - 1, page_order=pages.backend)
    if kv.shared_region is None:
        raise UnsupportedModel("model.engine: vllm needs memory files (memfd), which this system does not have")
    model = llm.vllm_config.model_config
    info = CheckpointInfo(
        name=options.model_name,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=eos_token_ids(options.model_dir, raw),
    )
    logger.info(
        "model loaded",
        extra={
            "model": info.name,
            "engine": f"vllm {VLLM_VERSION}",
            "attention": pages.backend,
            "tensor_parallel": options.tensor_parallel,
            "dtype": pages.dtype,
            "max_model_len": info.max_model_len,
            "num_blocks": kv.num_blocks,
            "block_size": shape.block_size,
            "load_s": round(time.monotonic() - started_s, 3),
        },
    )
    return RunningVllm(
        client=AsyncLlmClient(llm),
        pipes=pipes,
        kv=kv,
        num_blocks=kv.num_blocks,
        num_ranks=options.tensor_parallel,
        info=info,
    )


def check_vllm() -> None:
    """Raise UnsupportedModel when vLLM is missing or another version: its connector interface is not yet stable."""
    found = vllm_version(installed_package)
    if found is None:
        raise UnsupportedModel(
            f"model.engine: vllm needs vLLM {VLLM_VERSION}, which is not installed here; docs/engines.md says how to"
            " make a virtual environment with it"
        )
    if found != VLLM_VERSION:
        raise UnsupportedModel(f"model.engine: vllm needs vLLM {VLLM_VERSION}; {found} is installed")


def _check_options(options: EngineOptions, arguments: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the weights' files. Raises UnsupportedModel for a key that this engine does not have."""
    for name in arguments:
        if name in _OURS:
            raise UnsupportedModel(
                f"model.vllm.{name} is set by this project; leave it out, or use the key of serving.yaml for it"
            )
    device = resolve_device(options.device).type
    is_cpu_build = installed_package(VLLM_PACKAGES[0]) is not None
    if is_cpu_build != (device == "cpu"):
        raise UnsupportedModel(
            f"model.device: {options.device} is {device} here, and the vLLM that is installed is for"
            f" {'CPUs' if is_cpu_build else 'GPUs'}; install the other one, or set model.device"
        )
    files = weight_files(options.model_dir)
    if is_gguf(files) or files[0].name == SEED_FILE:
        raise UnsupportedModel("model.engine: vllm reads checkpoints of safetensors files; model.id names none")
    return files


def _start(
    options: EngineOptions,
    arguments: Mapping[str, Any],
    files: tuple[Path, ...],
    raw: dict[str, Any],
    pipes: Pipes,
) -> Any:
    """Return the running AsyncLLM. Raises UnsupportedModel in vLLM's words when it does not serve the model."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine.vllm.sampling import PROCESSOR
    from engine.vllm.staging_plugin import CONNECTOR

    chosen: dict[str, Any] = {}
    is_cpu = resolve_device(options.device).type == "cpu"
    if is_cpu:
        chosen["dtype"] = str(resolve_dtype(options.dtype, torch.device("cpu"), raw)).removeprefix("torch.")
    elif options.dtype != "auto":
        chosen["dtype"] = options.dtype
    if is_cpu or options.kv_memory_bytes is not None:
        chosen["kv_cache_memory_bytes"] = options.kv_memory_bytes or _kv_bytes(options, files)
    if options.num_blocks is not None:
        chosen["num_gpu_blocks_override"] = options.num_blocks + 1  # vLLM keeps one for itself
    extra = {"worker_pid": os.getpid(), "report_fds": pipes.writing}
    try:
        asked = AsyncEngineArgs(
            model=str(options.model_dir),
            skip_tokenizer_init=True,
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            tensor_parallel_size=options.tensor_parallel,
            max_num_batched_tokens=max(options.max_step_tokens, options.max_running),
            max_num_seqs=options.max_running,
            enable_prefix_caching=True,
            generation_config="vllm",
            disable_log_stats=True,
            logits_processors=[PROCESSOR],
            kv_transfer_config=KVTransferConfig(**CONNECTOR, kv_connector_extra_config=extra),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            **chosen,
            **{"enforce_eager": options.kernels != "compile"} | dict(arguments),
        )
        return AsyncLLM.from_engine_args(asked)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reports = (each for idx in range(len(pipes.reading)) for each in pipes.take(idx))
        reason = next((each.reason for each in reports if isinstance(each, Refusal)), str(error))
        raise UnsupportedModel(f"vLLM cannot serve {options.model_dir}: {reason}") from error


def _kv_bytes(options: EngineOptions, files: tuple[Path, ...]) -> int:
    """Return the bytes of vLLM's pages: half of this worker's memory for KV; staged blocks have the other half."""
    num_weight_bytes = sum(file.stat().st_size for file in files)
    return max(1, host_kv_bytes(measure_host(), options.memory_share) - num_weight_bytes) // 2


def _shape(options: EngineOptions, pages: PageReport, files: tuple[Path, ...]) -> KvShape:
    """Return the shape of a staged block, whose keys and values are halves of a page."""
    element_bytes = getattr(torch, pages.dtype).itemsize
    row_elements, rest = divmod(prod(pages.page_shape), 2 * options.block_size)
    if rest:
        raise UnsupportedModel(f"cannot hand over pages of {pages.page_shape}: no even number of bytes per token")
    essentials = (
        *("vllm", VLLM_VERSION, _STAGING_VERSION, pages.backend, pages.dtype, pages.page_shape, pages.num_layers),
        *(options.block_size, content_digest(files), (options.model_dir / "config.json").read_bytes()),
        grammar_library_version(),
    )
    return KvShape(
        num_layers=pages.num_layers,
        num_kv_heads=1,
        head_dim=row_elements,
        block_size=options.block_size,
        dtype=pages.dtype,
        row_bytes=row_elements * element_bytes,
        fingerprint=hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest(),
    )
