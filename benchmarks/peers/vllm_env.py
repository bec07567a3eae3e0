"""The environment in which vLLM's CPU build is fastest on few cores."""

from pathlib import Path

_IDLE_SPIN_MS = 5


def vllm_environment(venv: Path, *, threads: int, kv_memory_gib: int) -> dict[str, str]:
    """Return what to set for vLLM from `venv`, on `threads` cores.

    Its model runs in the process of its engine core: in a process of its own, its default, messages take a third of the
    speed of small batches on two cores. It would leave one core to them, too; here every core computes. Threads that
    wait sleep soon, by the value that it sets for its own workers. Intel's OpenMP is preloaded as its guide says, where
    its venv has it.
    """
    env = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": str(_IDLE_SPIN_MS),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_memory_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = venv / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)
    return env
