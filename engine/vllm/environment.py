"""Environment variables under which a worker starts its vLLM, whose processes inherit them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.model_files import cache_dir
from engine.ops.cpu.build import NotBuilt, find_compiler
from engine.options import EngineOptions
from engine.weights.config import UnsupportedModel
from engine.weights.precision import resolve_device

ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where ours goes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers of one host would choose the same cores
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would lose
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # blocks are looked up by the names that events give them
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another interface
    "TORCHDYNAMO_DISABLE": "1",  # with several ranks it would compile how they look tokens up: a minute, and a compiler
}
_COMPILED = {
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_USE_AOT_COMPILE": "0",  # its cache of graphs does not load in this version, and all compiles twice
}
_ONE_RANK = {
    # On a CPU, the only rank computes in the process of vLLM's scheduler. In one of its own, as is vLLM's default, the
    # messages of each step cost a third of the speed of small batches on two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def environment_of(options: EngineOptions) -> dict[str, str]:
    """Return the variables for these options. Raises UnsupportedModel where a compiler is asked for and missing."""
    num_threads = max(1, torch.get_num_threads() // options.tensor_parallel)
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(num_threads)}
    if options.kernels == "compile":
        environment |= _compiled()
    if resolve_device(options.device).type == "cpu":
        environment |= _ONE_RANK if options.tensor_parallel == 1 else {}
    return environment


@contextmanager
def preloaded_openmp(options: EngineOptions) -> Iterator[None]:
    """Let processes that start meanwhile preload Intel's OpenMP, as vLLM's guide for CPUs says, where Python has it."""
    library, before = Path(sys.prefix) / "lib" / "libiomp5.so", os.environ.get("LD_PRELOAD", "")
    if resolve_device(options.device).type != "cpu" or not library.exists() or library.name in before:
        yield
        return
    # By vLLM's value for its own workers, threads that wait sleep soon: other processes need the cores.
    os.environ.update(KMP_BLOCKTIME="5", LD_PRELOAD=f"{library} {before}".strip())
    try:
        yield
    finally:  # this process starts others that have no use for it
        if before:
            os.environ["LD_PRELOAD"] = before
        else:
            del os.environ["LD_PRELOAD"]


def _compiled() -> dict[str, str]:
    """Return the variables of `torch.compile`. Raises UnsupportedModel where there is no C++ compiler."""
    if isinstance(compiler := find_compiler(), NotBuilt):
        raise UnsupportedModel(f"model.kernels: compile: {compiler.reason}; install g++, or leave the key out")
    folder = str(cache_dir() / "torchinductor")
    return _COMPILED | {"TORCHINDUCTOR_CACHE_DIR": folder, "CXX": os.environ.get("CXX", compiler[0])}
