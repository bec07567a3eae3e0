"""Makes a `VllmExecutor`: vLLM's executor without its engine core, over pages of ours.

With one rank vLLM's worker lives in this process. With several, each is a process of its own, which ends with this one;
the death of a rank ends this process, so that a worker with several ranks lives and dies as one.
"""

import hashlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.engines import VLLM_VERSION
from common.errors import EngineFault
from common.model_files import cache_dir
from common.random_models import SEED_FILE
from common.sampling import MAX_N
from engine.kv_cache import num_blocks_for_budget
from engine.kv_store import KvShape
from engine.memory import host_kv_bytes, measure_host
from engine.model.checkpoints.checkpoint import is_gguf, read_config
from engine.model.config import UnsupportedModel
from engine.model.loader import content_digest, grammar_library_version, weight_files
from engine.model.precision import dtype_name, resolve_device, resolve_dtype
from engine.ops.cpu.build import NotBuilt, find_compiler
from engine.options import CheckpointInfo, EngineOptions, eos_token_ids
from engine.sequence import MAX_FORCED_TOKENS
from engine.vllm.executor import VllmExecutor
from engine.vllm.pages import VllmKvStore
from engine.vllm.rank import RankSetup, forget_shared_names
from engine.vllm.signatures import check_vllm

logger = logging.getLogger(__name__)

_ARITHMETIC_VERSION = 2
_EXIT_RANK_DIED = 70  # sysexits.h: internal software error
ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where ours goes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers of one host would choose the same cores
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would lose
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",  # with several ranks it would compile how they look tokens up: a minute, and a compiler
}
_COMPILED = {
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_USE_AOT_COMPILE": "0",  # its cache of graphs does not load in this version, and all compiles twice
}


def load_vllm_executor(options: EngineOptions) -> VllmExecutor:
    """Return an executor; takes seconds. Raises UnsupportedModel, naming what cannot be served."""
    started_s = time.monotonic()
    is_here = options.tensor_parallel == 1  # vLLM's CPU build would give even one rank a process of its own
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not is_here))})
    files = _check_options(options)
    is_compiled = options.kernels == "compile"
    if is_compiled:
        os.environ.update(_compiled_environment())
    check_vllm()
    raw = read_config(options.model_dir, files)
    dtype = resolve_dtype(options.dtype, torch.device("cpu"), raw)
    config = _vllm_config(options, dtype)
    ranks = _start_ranks(config, options)
    if is_compiled:
        _compile(ranks, options)
    spec = _start_pages(ranks, config)
    num_kv_heads: int = config.model_config.get_total_num_kv_heads()
    shape = KvShape(
        num_layers=spec.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        block_size=options.block_size,
        dtype=dtype_name(dtype),
        row_bytes=spec.head_dim * dtype.itemsize,
        fingerprint=_fingerprint(options, files, spec, dtype, num_kv_heads),
    )
    store = VllmKvStore(shape, _num_blocks(options, shape))
    info = CheckpointInfo(
        name=options.model_name,
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        eos_token_ids=eos_token_ids(options.model_dir, raw),
    )
    region = store.shared_region
    if region is None:
        raise UnsupportedModel("model.engine: vllm needs memory files (memfd), which this system does not have")
    setup = RankSetup(
        region_path=f"/proc/{os.getpid()}/fd/{region.fd}",
        num_blocks=store.num_blocks,
        shape=shape,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    store.learn(ranks.collective_rpc("kvrelay_open", args=(setup,))[0])
    if not is_here:
        forget_shared_names()
    executor = VllmExecutor(ranks, store, info, hidden_size=config.model_config.get_hidden_size())
    try:
        executor.try_out()
    except EngineFault as error:
        raise UnsupportedModel(
            f"vLLM cannot compute {options.model_dir} in model.dtype: {dtype_name(dtype)}: {error}"
        ) from error
    logger.info(
        "model loaded",
        extra={
            "model": info.name,
            "engine": f"vllm {VLLM_VERSION}",
            "attention": spec.backend,
            "tensor_parallel": options.tensor_parallel,
            "compiled": is_compiled,
            "dtype": dtype_name(dtype),
            "num_layers": shape.num_layers,
            "max_model_len": info.max_model_len,
            "kv_bytes": store.num_blocks * shape.block_bytes,
            "num_blocks": store.num_blocks,
            "block_size": shape.block_size,
            "load_s": round(time.monotonic() - started_s, 3),
        },
    )
    return executor


def _check_options(options: EngineOptions) -> tuple[Path, ...]:
    """Return the weights' files. Raises UnsupportedModel for a key that vLLM's runner does not have here."""
    if resolve_device(options.device).type != "cpu":
        raise UnsupportedModel(
            "model.engine: vllm computes on CPUs: the pages of its attention on GPUs have not been mapped; set"
            " model.device: cpu, or model.engine: torch"
        )
    files = weight_files(options.model_dir)
    if is_gguf(files) or files[0].name == SEED_FILE:
        raise UnsupportedModel("model.engine: vllm reads checkpoints of safetensors files; model.id names none")
    return files


def _compiled_environment() -> dict[str, str]:
    """Return the variables of `torch.compile`. Raises UnsupportedModel where there is no C++ compiler."""
    if isinstance(compiler := find_compiler(), NotBuilt):
        raise UnsupportedModel(f"model.kernels: compile: {compiler.reason}; install g++, or leave the key out")
    folder = str(cache_dir() / "torchinductor")
    return _COMPILED | {"TORCHINDUCTOR_CACHE_DIR": folder, "CXX": os.environ.get("CXX", compiler[0])}


def _vllm_config(options: EngineOptions, dtype: torch.dtype) -> Any:
    """Return vLLM's configuration. Raises UnsupportedModel when it has none for the model."""
    from vllm.engine.arg_utils import EngineArgs

    max_seqs = max(options.max_running, MAX_N)
    try:
        config = EngineArgs(
            model=str(options.model_dir),
            skip_tokenizer_init=True,
            dtype=dtype_name(dtype),
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            tensor_parallel_size=options.tensor_parallel,
            distributed_executor_backend="uni" if options.tensor_parallel == 1 else "mp",
            worker_extension_cls="engine.vllm.rank.RankExtension",
            # Tokens that a grammar forces, and samples of a lone prompt, come on top of the scheduler's budget.
            max_num_batched_tokens=options.max_step_tokens + max_seqs + MAX_FORCED_TOKENS,
            max_num_seqs=max_seqs,
            enable_prefix_caching=False,
            async_scheduling=False,
            enforce_eager=options.kernels != "compile",
            kv_cache_memory_bytes=1,  # the pages are ours; named, so that vLLM measures no memory for its own
            generation_config="vllm",
        ).create_engine_config()
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedModel(f"vLLM cannot serve {options.model_dir}: {error}") from error
    if config.model_config.use_mla:  # before its weights are packed, which not every dtype allows
        raise UnsupportedModel(
            f"model.engine: vllm: {options.model_dir} has latent attention (MLA); only models whose layers all keep"
            " full attention's keys and values of one shape can be handed over"
        )
    if config.use_v2_model_runner:
        raise UnsupportedModel("model.engine: vllm drives vLLM's V1 model runner: unset VLLM_USE_V2_MODEL_RUNNER")
    return config


def _start_ranks(config: Any, options: EngineOptions) -> Any:
    """Return vLLM's executor with loaded weights."""
    from vllm.v1.executor.abstract import Executor

    if options.tensor_parallel > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // options.tensor_parallel))
    ranks = Executor.get_class(config)(config)
    ranks.register_failure_callback(_end_process)
    return ranks


def _compile(ranks: Any, options: EngineOptions) -> None:
    """Let the ranks compile the model by a trial step, before they have pages; takes a minute when it is new.

    Raises UnsupportedModel when it cannot be compiled.
    """
    logger.info("compiling the model: about a minute the first time, then from the cache")
    try:
        ranks.determine_available_memory()  # vLLM compiles there; how much memory it finds does not matter
    except Exception as error:  # torch has no base class for what stops its compiler
        raise UnsupportedModel(
            f"model.kernels: compile: {options.model_dir} cannot be compiled: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageSpec:
    """Facts about the pages of a model that has one kind of them."""

    num_layers: int
    head_dim: int
    backend: str
    """Attention backend."""


def _start_pages(ranks: Any, config: Any) -> _PageSpec:
    """Let the ranks prepare attention over pages, the fewest that vLLM takes: ours replace them.

    Raises UnsupportedModel for a model whose state is not in pages of keys and values, one per token and head.
    """
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    specs = ranks.get_kv_cache_specs()
    own = specs[0]
    kinds = sorted({type(spec).__name__ for spec in own.values()})
    if kinds != [FullAttentionSpec.__name__] or len(set(own.values())) != 1:
        shown = ", ".join(kinds) if kinds != [FullAttentionSpec.__name__] else "layers of different shapes"
        raise UnsupportedModel(
            f"model.engine: vllm: {config.model_config.model} keeps {shown or 'no keys and values'}; only models whose"
            " layers all keep full attention's keys and values of one shape can be handed over"
        )
    spec = next(iter(own.values()))
    if spec.kv_quant_mode != KVQuantMode.NONE or spec.head_size != spec.head_size_v:
        raise UnsupportedModel(f"model.engine: vllm: the pages of {config.model_config.model} are quantized or uneven")
    layout = resolve_kv_cache_layout(
        config, ranks.get_supported_kv_cache_layouts(), [each for rank in specs for each in rank.values()]
    )
    ranks.set_kv_cache_layout(layout.name)
    num_blocks = -(-config.model_config.max_model_len // spec.block_size) + 1
    needed = num_blocks * spec.page_size_bytes * len(own)
    configs = get_kv_cache_configs(config, specs, [needed] * len(specs))
    for each in configs:
        each.kv_cache_layout = layout.name
    config.cache_config.num_gpu_blocks = configs[0].num_blocks
    ranks.initialize_from_config(configs)
    ranks.compile_or_warm_up_model()
    backend = ranks.collective_rpc("kvrelay_backend", args=())[0]
    if backend != "CPU_ATTN":
        raise UnsupportedModel(f"model.engine: vllm: the pages of vLLM's attention backend {backend} are not mapped")
    return _PageSpec(num_layers=len(own), head_dim=spec.head_size, backend=backend)


def _num_blocks(options: EngineOptions, shape: KvShape) -> int:
    """Return as many pages as configured, or as fit beside the weights, which are loaded already."""
    if options.num_blocks is not None:
        return options.num_blocks
    kv_bytes = options.kv_memory_bytes
    if kv_bytes is None:
        kv_bytes = host_kv_bytes(measure_host(), options.memory_share)
    return num_blocks_for_budget(kv_bytes, shape)


def _fingerprint(
    options: EngineOptions, files: tuple[Path, ...], spec: _PageSpec, dtype: torch.dtype, num_kv_heads: int
) -> str:
    """Return a hash of everything that KV and tokens depend on.

    The number of ranks and whether the model is compiled are not part of it: they change only roundings.
    """
    essentials = (
        *("vllm", VLLM_VERSION, _ARITHMETIC_VERSION, spec.backend, dtype_name(dtype), options.block_size),
        *(spec.num_layers, num_kv_heads, spec.head_dim, content_digest(files)),
        (options.model_dir / "config.json").read_bytes(),
        grammar_library_version(),
    )
    return hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest()


def _end_process() -> None:
    logger.critical("a rank of this worker has died: the worker ends")
    os._exit(_EXIT_RANK_DIED)
