"""Compiles every kernel for Hopper through its own launcher, without a GPU, and prints each one's usage as JSON lines.

Run as `python -m tests.engine.triton_kernels.compile_kernels`, without TRITON_INTERPRET. Tensors are on torch's meta
device and launches end where a module would be loaded.
"""
# mypy: disable-error-code="import-untyped"

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.device.move_blocks import move_blocks
from engine.ops.triton_kernels.decode_attention import decode_attention, split_keys
from engine.ops.triton_kernels.elementwise import (
    add_rms_norm,
    add_rms_norm_fp8,
    gate_mul,
    gate_mul_fp8,
    rms_norm,
    rms_norm_fp8,
)
from engine.ops.triton_kernels.latent_attention import (
    attend_latent_chunks,
    decode_latent,
    split_latent_keys,
)
from engine.ops.triton_kernels.latent_rows import LatentPages
from engine.ops.triton_kernels.latent_write import LatentRotation, latent_write
from engine.ops.triton_kernels.pages import LayerPages
from engine.ops.triton_kernels.prefill_attention import prefill_attention
from engine.ops.triton_kernels.rope_kv_write import HeadNorms, rope_kv_write
from engine.ops.triton_kernels.step import DeviceStep
from engine.sampling.cut import cut
from engine.sampling.race import race
from engine.weights.architectures import Activation
from engine.weights.kernels import int8_linear, quantize_rows
from tests.engine.triton_kernels.refills import refills_without_barrier

_NUM_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model by which kernels differ."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    has_head_norms: bool = False
    has_sinks: bool = False
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_dtype: torch.dtype | None = None


_QWEN3_0_6B = Shape(
    name="qwen3-0.6b",
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    has_head_norms=True,
)
_LLAMA_8B = Shape(
    name="llama-3.1-8b",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
)
_SMOLLM2 = Shape(
    name="smollm2-135m",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
)
SHAPES = (
    _QWEN3_0_6B,
    _LLAMA_8B,
    replace(_LLAMA_8B, name="llama-3.1-8b float8 pages", page_dtype=torch.float8_e4m3fn),
    replace(_LLAMA_8B, name="llama-3.1-8b window 4096", window=4096, block_size=32),
    replace(_LLAMA_8B, name="llama-3.1-8b float32", dtype=torch.float32),
    replace(_LLAMA_8B, name="head_dim 256", num_heads=16, head_dim=256),
    _SMOLLM2,
    Shape(
        name="gpt-oss-20b",
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        hidden_size=2880,
        intermediate_size=2880,
        has_sinks=True,
        window=128,
    ),
)
_LATENT_HEADS = {"deepseek-v2-lite": (27, 16), "deepseek-v3": (61, 128)}
"""Layers of each model, and heads of a layer."""


class _HopperDriver:
    """Part of Triton's driver that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def main() -> None:
    """Print a line per kernel and shape."""
    compiled: list[Any] = []

    def compile_only(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: compiled.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))

    triton.runtime.driver.set_active(_HopperDriver())
    JITFunction.__getitem__ = compile_only
    for shape in SHAPES:
        _launch_kernels(shape)
        _print_and_forget(shape.name, compiled)
    for name, sizes in _LATENT_HEADS.items():
        _launch_latent_kernels(*sizes)
        _print_and_forget(name, compiled)
    _launch_kernels_of_any_shape()
    _print_and_forget("any", compiled)


def _print_and_forget(shape_name: str, compiled: list[Any]) -> None:
    for kernel in compiled:
        print(json.dumps({"shape": shape_name, **_usage(kernel)}), flush=True)  # noqa: T201
    compiled.clear()


def _launch_kernels(shape: Shape) -> None:
    def empty(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    sizes = (_NUM_TOKENS, 2 * shape.num_layers, shape.block_size, shape.num_kv_heads, shape.head_dim)
    keys, values = empty(*sizes, dtype=shape.page_dtype or shape.dtype).unbind(1)[:2]
    pages = LayerPages(keys=keys, values=values, window=shape.window)
    step = _step()
    norm = empty(shape.head_dim, dtype=torch.float32)
    norms = HeadNorms(query=norm, key=norm, eps=1e-6) if shape.has_head_norms else None
    rotations = empty(4096, shape.head_dim, dtype=torch.float32)
    for num_tokens in (1, _NUM_TOKENS):
        qkv = empty(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        query = rope_kv_write(qkv, norms, rotations, pages, step)
    sinks = empty(shape.num_heads) if shape.has_sinks else None
    decode_attention(query, query, pages, step, split_keys(1, shape.num_heads, pages, num_sms=132), sinks)
    prefill_attention(query, query, pages, step, sinks)
    if shape not in (_QWEN3_0_6B, _LLAMA_8B, _SMOLLM2):
        return  # the other shapes have equal elementwise kernels
    x, weight = empty(_NUM_TOKENS, shape.hidden_size), empty(shape.hidden_size, dtype=torch.float32)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    rms_norm_fp8(x, weight, 1e-6)
    add_rms_norm_fp8(x, x, weight, 1e-6)
    for activation in filter(lambda each: each.has_gate, Activation):
        gate_mul(empty(_NUM_TOKENS, 2 * shape.intermediate_size), activation)
        gate_mul_fp8(empty(_NUM_TOKENS, 2 * shape.intermediate_size), activation)


def _launch_latent_kernels(num_layers: int, num_heads: int) -> None:
    """DeepSeek's rows, which queries of 192 values attend to."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="meta")

    rows = empty(_NUM_TOKENS, num_layers, 16, 1, 576)[:, 0]
    pages, step = LatentPages(rows=rows, rank=512, score_scale=0.1), _step()
    rotation = LatentRotation(
        norm=empty(512).float(), eps=1e-6, angles=empty(4096, 64).float(), has_interleaved_pairs=True
    )
    latent_write(empty(_NUM_TOKENS, num_heads, 192), empty(_NUM_TOKENS, 576), rotation, pages, step)
    query, output = empty(_NUM_TOKENS, num_heads, 576), empty(_NUM_TOKENS, num_heads, 512)
    decode_latent(output, query, pages, step, split_latent_keys(1, num_heads, pages, num_sms=132))
    attend_latent_chunks(output, query, pages, step)


def _step() -> DeviceStep:
    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    return DeviceStep(
        positions=empty(_NUM_TOKENS),
        slot_mapping=empty(_NUM_TOKENS, dtype=torch.int64),
        context_lens=empty(_NUM_TOKENS),
        block_tables=empty(_NUM_TOKENS, 64),
        query_start_loc=empty(_NUM_TOKENS + 1),
        decode_seqs=None,
        prefill_tiles=empty(8, 2),
    )


def _launch_kernels_of_any_shape() -> None:
    blocks = torch.empty((8, 8192), dtype=torch.int64, device="meta")
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    move_blocks(blocks, ids, blocks, ids)
    x = torch.empty((64, 4096), dtype=torch.bfloat16, device="meta")
    quantize_rows(x)
    scale = torch.empty((4096, 1), dtype=torch.bfloat16, device="meta")
    token_ids = torch.empty(64, dtype=torch.int64, device="meta")
    reals = torch.empty(64, dtype=torch.float64, device="meta")
    for vocab_size in (151936, 49152, 50257):
        logits = torch.empty((64, vocab_size), dtype=torch.float32, device="meta")
        kept = cut(logits, token_ids, reals, reals, reals)
        race(logits, token_ids, reals, reals, token_ids, kept)
    for num_tokens in (64, 256):
        rows = torch.empty((num_tokens, 4096), dtype=torch.bfloat16, device="meta")
        int8_linear(rows, torch.empty((4096, 4096), dtype=torch.int8, device="meta"), scale)


def _usage(kernel: Any) -> dict[str, Any]:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [os.fspath(cuobjdump), "--dump-resource-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found is not None, report
    registers, stack, local = map(int, found.groups())
    return {
        "kernel": kernel.metadata.name,
        "num_warps": kernel.metadata.num_warps,
        "registers": registers,
        "spilled_bytes": stack + local,
        "shared_bytes": kernel.metadata.shared,
        "has_tensor_cores": re.search(r"\b(wgmma|mma)\.", kernel.asm["ptx"]) is not None,
        "refills_without_barrier": refills_without_barrier(kernel.asm["ptx"]),
        "has_async_copies": "cp.async" in kernel.asm["ptx"],
        "has_16_byte_copies": "ld.global.v2.b64" in kernel.asm["ptx"] and "st.global.v2.b64" in kernel.asm["ptx"],
    }


if __name__ == "__main__":
    main()
