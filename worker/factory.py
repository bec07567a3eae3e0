"""Builds the executor and limits that serving.yaml asks for."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tokenizers

from common.cgroups import usable_cores
from common.chat_template import LineTemplate
from common.config import ModelConfig, PoolConfig, ServingConfig
from common.engines import lacks
from common.fake_tokenizer import byte_tokenizer
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, expanded, resolve_model
from common.parity import Template
from common.text_files import load_chat_template, load_tokenizer
from engine.device.memory import MemoryShare
from engine.executor import Executor
from engine.fake import FakeExecutor
from engine.fake_pages import fake_shape
from engine.interface import ServedModel
from engine.speculation.draft_model import DifferentVocabulary, ModelDrafter
from engine.speculation.drafter import Drafter
from engine.speculation.eagle import EagleDrafter
from engine.speculation.heads import HeadsDrafter
from engine.speculation.ngram import NgramDrafter
from engine.steps.scheduler import SchedulerLimits
from engine.steps.speculator import Rule, Speculator
from engine.thread import DriverFactory, EngineThread

if TYPE_CHECKING:
    from engine.options import EngineOptions

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_FAKE_KV_BYTES = 1 << 20  # hashes need no more
_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model.bin")


def limits_for(pool: PoolConfig) -> SchedulerLimits:
    """Return the scheduler's bounds for a pool."""
    return SchedulerLimits(
        block_size=pool.block_size,
        max_step_tokens=pool.max_step_tokens,
        max_running=pool.max_running,
        max_waiting=pool.max_waiting,
    )


def speculator_for(config: ServingConfig, pool: PoolConfig, executor: Executor) -> Speculator | None:
    """Return the speculator for a worker of `pool`; None when speculation is off, or the executor cannot verify drafts.

    Loads a draft model, which takes seconds. Raises DifferentVocabulary, ModelNotFound, UnsupportedModel.
    """
    speculation = config.model.speculation
    if speculation.method == "off":
        return None
    if not executor.verifies_drafts:
        logger.warning(
            "model.speculation is off for %s: it needs attention by the compiled CPU kernels, which latent attention"
            " does not have, and no recurrent layers",
            executor.model_name,
        )
        return None
    rule = Rule(speculation.rule)
    num_others = speculation.num_branches - 1
    if speculation.method == "ngram":
        return Speculator(NgramDrafter(num_branches=num_others), num_tokens=speculation.num_tokens, rule=rule)
    if pool is not config.pools.decode:  # a prefill worker would keep a drafter for nothing
        return None
    drafter: Drafter
    is_coupled = rule is Rule.COUPLED
    model_id = speculation.model or config.model.id
    match speculation.method:
        case "heads":
            drafter = _load_heads(config, model_id, executor)
        case "eagle" | "mtp" as kind:
            drafter = _load_draft_layer(config, model_id, executor, kind=kind, is_coupled=is_coupled)
        case _:
            draft_model = _load_draft_model(config, pool, model_id)
            drafter = ModelDrafter(draft_model, target=executor, is_coupled=is_coupled, num_branches=num_others)
    return Speculator(drafter, num_tokens=speculation.num_tokens, rule=rule)


def _draft_folder(config: ServingConfig, model_id: str) -> Path:
    """Return the files of what drafts. Raises ModelNotFound that names its key."""
    try:
        return resolve_model(model_id, local_files_only=config.model.local_files_only)
    except ModelNotFound as error:
        raise ModelNotFound(str(error), key="model.speculation.model") from error


def _load_heads(config: ServingConfig, model_id: str, executor: Executor) -> HeadsDrafter:
    """Return a drafter by the heads of a checkpoint. Raises ModelNotFound, UnsupportedModel."""
    from engine.loading import load_draft_heads

    folder = _draft_folder(config, model_id)
    return load_draft_heads(folder, executor, num_branches=config.model.speculation.num_branches - 1)


def _load_draft_layer(
    config: ServingConfig, model_id: str, executor: Executor, *, kind: Literal["eagle", "mtp"], is_coupled: bool
) -> EagleDrafter:
    """Return a drafter by the draft layer of a checkpoint. Raises ModelNotFound, UnsupportedModel."""
    from engine.loading import load_draft_layer

    speculation = config.model.speculation
    return load_draft_layer(
        _draft_folder(config, model_id),
        executor,
        kind=kind,
        kv_bytes=int(speculation.kv_memory_gib * _GIB),
        is_coupled=is_coupled,
        num_branches=speculation.num_branches - 1,
    )


def _load_draft_model(config: ServingConfig, pool: PoolConfig, model_id: str) -> Executor:
    """Return an executor of the draft model with pages of its own. Raises DifferentVocabulary, ModelNotFound."""
    from engine.loading import load_executor
    from engine.options import EngineOptions

    model = config.model
    model_dir = _draft_folder(config, model_id)
    target_dir = resolve_model(model.id, local_files_only=model.local_files_only)
    if load_tokenizer(model_dir).get_vocab() != load_tokenizer(target_dir).get_vocab():
        raise DifferentVocabulary(
            f"cannot draft with {model_id}: its tokens are not those of {model.id}; choose a model with its tokenizer"
        )
    return load_executor(
        EngineOptions(
            model_dir=model_dir,
            model_name=f"{model_id} (draft)",
            dtype=model.dtype,
            device="cpu",
            block_size=pool.block_size,
            kv_memory_bytes=int(model.speculation.kv_memory_gib * _GIB),
            max_step_tokens=pool.max_step_tokens,
            max_running=pool.max_running,
            kernels=model.kernels,
            may_have_window_pages=False,  # its drafter has block tables alone
        )
    )


def load_model_for(config: ServingConfig, pool: PoolConfig) -> tuple[ServedModel, DriverFactory, tokenizers.Tokenizer]:
    """Load model and tokenizer. Takes seconds: not on the event loop. Errors say what to do.

    The factory makes the model's engine.
    """
    if config.model.engine == "vllm":
        from engine.vllm.driver import VllmDriver
        from engine.vllm.start import start_vllm

        model_dir = resolve_model(config.model.id, local_files_only=config.model.local_files_only)
        vllm = start_vllm(_options(config, pool, model_dir), config.model.vllm)
        return vllm, VllmDriver.of, load_tokenizer(model_dir)
    executor, tokenizer = load_executor_for(config, pool)
    speculator = speculator_for(config, pool, executor)
    return executor, partial(EngineThread.of, speculator=speculator), tokenizer


def load_executor_for(config: ServingConfig, pool: PoolConfig) -> tuple[Executor, tokenizers.Tokenizer]:
    """Load model and tokenizer for an engine of our own. Takes seconds. Errors say what to do."""
    if config.model.engine == "fake":
        kv_bytes = _fixed_kv_bytes(pool) or _FAKE_KV_BYTES
        num_blocks = pool.num_blocks or kv_bytes // fake_shape(pool.block_size).block_bytes
        fake = FakeExecutor(
            num_blocks=min(num_blocks, 1 << 20),
            block_size=pool.block_size,
            max_model_len=config.model.max_model_len or 4096,
            step_s=config.model.fake_step_ms / 1000,
            model_name=config.model.name or "fake",
        )
        return fake, byte_tokenizer()
    model_dir = resolve_model(config.model.id, local_files_only=config.model.local_files_only)
    from engine.loading import load_executor

    return load_executor(_options(config, pool, model_dir)), load_tokenizer(model_dir)


def load_template_for(config: ServingConfig) -> Template | None:
    """Return the model's chat template, or None when it has none. Raises CannotStart."""
    if config.model.engine == "fake":
        return LineTemplate()
    model = config.model
    return load_chat_template(resolve_model(model.id, local_files_only=model.local_files_only), own=model.chat_template)


def served_name(model: ModelConfig, model_dir: Path) -> str:
    """Return the name under which clients ask for the model."""
    is_folder = model.id == DEFAULT_MODEL_ID or expanded(model.id).is_dir()
    return model.name or (model_dir.name if is_folder else model.id)


def _options(config: ServingConfig, pool: PoolConfig, model_dir: Path) -> "EngineOptions":
    """Return the options of a worker's engine, and limit the threads of torch."""
    import torch  # takes seconds, and the fake engine does not need it

    from engine.options import EngineOptions

    threads = os.environ.get("KVRELAY_THREADS") if pool.threads == "auto" else pool.threads
    torch.set_num_threads(int(threads or min(torch.get_num_threads(), usable_cores())))
    model = config.model
    # The device memory of steps is sized once, for both roles that the worker may have.
    pools = (config.pools.prefill, config.pools.decode) if config.pools.flip_obstacle is None else (pool,)
    share = memory_share(config, pool, os.environ, cores=usable_cores())
    return EngineOptions(
        model_dir=model_dir,
        model_name=served_name(model, model_dir),
        dtype=model.dtype,
        device=model.device,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_memory_bytes=_fixed_kv_bytes(pool),
        memory_share=replace(share, reserved_bytes=drafting_bytes(config, pool)),
        max_model_len=model.max_model_len,
        max_step_tokens=max(each.max_step_tokens for each in pools),
        max_running=max(each.max_running for each in pools),
        quantization=model.quantization,
        kv_dtype=model.kv_dtype,
        kernels=model.kernels,
        tensor_parallel=pool.tensor_parallel,
    )


def memory_share(config: ServingConfig, pool: PoolConfig, environ: Mapping[str, str], *, cores: int) -> MemoryShare:
    """Return the share of its host's and device's memory that a worker of `pool` may use.

    The launcher divides the memory of a host that it knows (`cluster.processes.plan`); on a host chosen by Ray a worker
    gets the same share of memory as of cores; started by hand, it gets all. A GPU belongs to the workers that reserve
    it; the launcher says how many others are on the one that it dealt to a worker without a reservation. Where it does
    not know the host, such workers see the same one, and share it.
    """
    num_sharing = sum(p.count for p in (config.pools.prefill, config.pools.decode) if not p.num_gpus)
    num_sharing = int(environ.get("KVRELAY_GPU_WORKERS") or num_sharing)
    dealt, num_cpus = environ.get("KVRELAY_MEMORY_BYTES"), environ.get("KVRELAY_NUM_CPUS")
    return MemoryShare(
        host_bytes=int(dealt) if dealt else None,
        host_fraction=min(1.0, int(num_cpus) / cores) if num_cpus else 1.0,
        device_fraction=min(1.0, pool.num_gpus) if pool.num_gpus else 1 / max(1, num_sharing),
    )


def drafting_bytes(config: ServingConfig, pool: PoolConfig) -> int:
    """Return about how many bytes drafting takes in a worker of `pool`. Raises ModelNotFound."""
    speculation = config.model.speculation
    if pool is not config.pools.decode or lacks(config.model.engine, "speculation"):
        return 0
    kv_bytes = int(speculation.kv_memory_gib * _GIB) if speculation.method in {"draft", "eagle", "mtp"} else 0
    if speculation.method == "mtp":
        from engine.loading import mtp_bytes

        return kv_bytes + mtp_bytes(resolve_model(config.model.id, local_files_only=config.model.local_files_only))
    if speculation.model is None:
        return 0
    folder = _draft_folder(config, speculation.model)
    return kv_bytes + sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))


def _fixed_kv_bytes(pool: PoolConfig) -> int | None:
    return None if pool.kv_memory_gib == "auto" else int(pool.kv_memory_gib * _GIB)
