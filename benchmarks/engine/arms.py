"""How each engine is started: its interpreter, its environment, and why it is set so.

Every arm gets all cores, the same checkpoint, in bfloat16 unless asked otherwise, KV memory for 4 GiB and no prefix
hits. Threads that wait must sleep soon, since the arms share the cores: OpenMP's spinning is bounded in each (vLLM by
the value that it sets for its own workers), and the benchmark checks the CPU time of the waiting arm.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.cases import Case
from benchmarks.peers.group import ArmSpec
from benchmarks.peers.vllm_server import vllm_environment

KVRELAY = "kvrelay"
VLLM_CPU = "vllm-cpu"
VLLM_CPU_DEFAULT = "vllm-cpu-default"
LLAMA_CPP = "llama-cpp"

FORMATS = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-kv": {"kv-dtype": "int8"},
    "int4-kv": {"kv-dtype": "int4"},
}
"""Formats of weights and of pages in which our engine can be measured beside bfloat16, and their options."""
PEER_DTYPES = ("bfloat16", "float32")
"""Dtypes in which vLLM can be measured."""
LLAMA_CPP_FORMATS = {"int8": "q8_0", "int4": "q4_0"}
"""llama.cpp's formats with as many bits for a weight."""

_KV_MEMORY_GIB = 4
_VLLM_KEYS = ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS")
"""Variables that vLLM gets even where it starts by its defaults."""


def kvrelay_arm(
    model_dir: Path, *, max_model_len: int, threads: int, max_step_tokens: int, number_format: str | None = None
) -> ArmSpec:
    """Our engine, with the environment that the launcher gives the only worker of a host."""
    module = [sys.executable, "-m", "benchmarks.peers.kvrelay_arm", "--model", str(model_dir)]
    return ArmSpec(
        name=KVRELAY if number_format is None else f"{KVRELAY} {number_format}",
        command=[
            *module,
            f"--max-model-len={max_model_len}",
            f"--kv-memory-gib={_KV_MEMORY_GIB}",
            f"--max-step-tokens={max_step_tokens}",
            *(f"--{option}={value}" for option, value in FORMATS.get(number_format or "", {}).items()),
        ],
        env={"OMP_NUM_THREADS": str(threads), "KVRELAY_THREADS": str(threads)},
    )


def vllm_arm(name: str, model_dir: Path, *, dtype: str, venv: Path, max_model_len: int, threads: int) -> ArmSpec:
    """The CPU build of vLLM: at its fastest here, or with its defaults for processes, threads and binding."""
    module = [
        str(venv / "bin" / "python"),
        "-m",
        "benchmarks.peers.vllm_arm",
        f"--model={model_dir}",
        f"--dtype={dtype}",
    ]
    env = vllm_environment(venv, threads=threads, kv_memory_gib=_KV_MEMORY_GIB)
    if name == VLLM_CPU_DEFAULT:
        env = {key: env[key] for key in _VLLM_KEYS}
    return ArmSpec(name=name, command=[*module, "--max-model-len", str(max_model_len)], env=env)


def llama_cpp_arm(gguf: Path, weights: str, *, venv: Path, cases: Sequence[Case], threads: int) -> ArmSpec:
    """llama.cpp with the default model in one of its formats; its context is as long as the cases need."""
    arguments = {
        "gguf": gguf,
        "weights": weights,
        "max-tokens": max(case.num_requests * (case.prompt_tokens + case.output_tokens) for case in cases),
        "max-seqs": max(case.num_requests for case in cases),
        "threads": threads,
    }
    command = [str(venv / "bin" / "python"), "-m", "benchmarks.peers.llama_cpp_arm"]
    return ArmSpec(
        name=f"{LLAMA_CPP} {weights}",
        command=[*command, *(f"--{name}={value}" for name, value in arguments.items())],
        env={"OMP_NUM_THREADS": str(threads)},
    )
