"""Builds the executor that serving.yaml asks for."""

import os
from pathlib import Path

import tokenizers

from common.config import PoolConfig, ServingConfig
from common.fake_tokenizer import byte_tokenizer
from common.model_files import resolve_model
from engine.executor import Executor
from engine.fake import FakeExecutor, fake_shape
from engine.scheduler import SchedulerLimits

_GIB = 1 << 30


def limits_for(pool: PoolConfig) -> SchedulerLimits:
    """Return the scheduler's bounds for a pool."""
    return SchedulerLimits(
        block_size=pool.block_size,
        max_step_tokens=pool.max_step_tokens,
        max_running=pool.max_running,
        max_waiting=pool.max_waiting,
    )


def load_executor_for(config: ServingConfig, pool: PoolConfig) -> tuple[Executor, tokenizers.Tokenizer]:
    """Load model and tokenizer. Takes seconds: not on the event loop. Raises with a reason a person can act on."""
    if config.model.engine == "fake":
        num_blocks = pool.num_blocks or int(pool.kv_memory_gib * _GIB) // fake_shape(pool.block_size).block_bytes
        fake = FakeExecutor(
            num_blocks=min(num_blocks, 1 << 20),
            block_size=pool.block_size,
            max_model_len=config.model.max_model_len or 4096,
            step_s=config.model.fake_step_ms / 1000,
        )
        return fake, byte_tokenizer()
    model_dir = resolve_model(config.model.id, local_files_only=config.model.local_files_only)
    return _load_torch(config, pool, model_dir), tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def _load_torch(config: ServingConfig, pool: PoolConfig, model_dir: Path) -> Executor:
    import torch  # seconds, and not needed by the fake engine

    from engine.runner import load_executor

    threads = os.environ.get("KVRELAY_THREADS") if pool.threads == "auto" else str(pool.threads)
    if threads:
        torch.set_num_threads(int(threads))
    return load_executor(
        model_dir=model_dir,
        model_name=config.model.id if config.model.id != "default" else model_dir.name,
        dtype=config.model.dtype,
        device=config.model.device,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_memory_bytes=int(pool.kv_memory_gib * _GIB),
        max_model_len=config.model.max_model_len,
    )
