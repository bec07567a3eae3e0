"""The kernels, compiled for this processor, and once more as for one with smaller registers.

A compiler that refuses them is a failure.
"""

import platform
from pathlib import Path

import pytest
import torch

from engine.ops.cpu.build import NotBuilt, build_kernels, find_compiler
from engine.ops.cpu.library import CpuKernels
from engine.weights.precision import cpu_has

_X86_ONLY = platform.machine() in {"x86_64", "AMD64"}


@pytest.fixture(scope="session", params=["native", "smaller-registers"])
def library(request: pytest.FixtureRequest) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "smaller-registers":
            if not _X86_ONLY:
                pytest.skip("not an x86 processor")
            widest = "avx512f" if cpu_has("avx512f") else "avx"
            patch.setenv("CXXFLAGS", f"-mno-{widest} -O1")  # a third of the time that -O3 compiles
        if isinstance(compiler := find_compiler(), NotBuilt):
            pytest.skip(compiler.reason)
        built = build_kernels()
    assert not isinstance(built, NotBuilt), built.reason
    return built


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest, library: Path) -> CpuKernels:
    return CpuKernels(library, getattr(torch, request.param))


@pytest.fixture(scope="session")
def float32_kernels(library: Path) -> CpuKernels:
    return CpuKernels(library, torch.float32)
