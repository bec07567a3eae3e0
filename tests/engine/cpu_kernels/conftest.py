"""The kernels, compiled for this processor, for one with smaller registers, and with emulated tile registers.

A compiler that refuses them is a failure.
"""

import itertools
import platform
from pathlib import Path

import pytest
import torch

from engine.ops.cpu.build import NotBuilt, build_kernels, find_compiler
from engine.ops.cpu.library import CpuKernels
from engine.weights.precision import cpu_has

_TILES = Path(__file__).with_name("emulated_tiles.h")
_X86_ONLY = platform.machine() in {"x86_64", "AMD64"}


_BUILDS = ("native", "smaller-registers")


def build(name: str) -> Path:
    """Compile the kernels, once for each name; skips the test where that cannot be had."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "smaller-registers":
            if not _X86_ONLY:
                pytest.skip("not an x86 processor")
            widest = "avx512f" if cpu_has("avx512f") else "avx"
            patch.setenv("CXXFLAGS", f"-mno-{widest} -O1")  # a third of the time that -O3 compiles
        if name == "tiles":
            if not cpu_has("avx512_bf16") or cpu_has("amx_tile"):
                pytest.skip("tile registers are emulated with AVX512-BF16 alone, and used where there are some")
            patch.setenv("CXXFLAGS", f"-D__AMX_TILE__ -D__AMX_BF16__ -O1 -include {_TILES}")
        if isinstance(compiler := find_compiler(), NotBuilt):
            pytest.skip(compiler.reason)
        built = build_kernels()
    assert not isinstance(built, NotBuilt), built.reason
    return built


@pytest.fixture(scope="session", params=_BUILDS)
def library(request: pytest.FixtureRequest) -> Path:
    return build(request.param)


@pytest.fixture(
    scope="session", params=[*itertools.product(("float32", "bfloat16"), _BUILDS), ("bfloat16", "tiles")], ids="-".join
)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    dtype, name = request.param
    return CpuKernels(build(name), getattr(torch, dtype))


@pytest.fixture(scope="session")
def float32_kernels(library: Path) -> CpuKernels:
    return CpuKernels(library, torch.float32)
