"""Resolves "auto" to a device and a dtype at start-up."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.weights.config import UnsupportedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_INFO = Path("/proc/cpuinfo")
# x86 with AVX-512 or AMX, and Arm: matrix products in bfloat16 without conversion to float32.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def resolve_device(device: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises UnsupportedModel when it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("cannot use cuda: torch finds no CUDA device", key="model.device")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device, raw_config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of weights and KV. Raises UnsupportedModel.

    "auto" is the checkpoint's own on a GPU; on a CPU bfloat16 with hardware support, else float32.
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
        dtype = str(raw_config.get("dtype") or raw_config.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"dtype: {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def cpu_has_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware; False when unknown."""
    return any(cpu_has(flag, cpu_info) for flag in _BFLOAT16_FLAGS)


def cpu_has(flag: str, cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the processor has a feature, by its name in Linux; False when unknown."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return flag in flags.split()
