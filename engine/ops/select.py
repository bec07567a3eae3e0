"""Chooses the kernels of a model on a CPU, once, when it is loaded."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.ops.cpu.build import NotBuilt, build_kernels
from engine.ops.cpu.draw import compiled_draw
from engine.ops.cpu.library import DTYPES, CpuKernels
from engine.ops.cpu.linear import (
    DepthParts,
    OneDnnLinear,
    PackedLinear,
    can_pack,
    can_pack_all,
    grouped_packer,
    pack_projections,
)
from engine.ops.cpu.ops import CpuOps, can_attend
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore
from engine.sampling.draw import DrawKernel
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import Convert, DecoderWeights, Linear
from engine.weights.grouped import GroupedLinear, RoundedInputs
from engine.weights.precision import cpu_has
from engine.weights.quantize import QuantizationMethod, quantizer, widen_weights

logger = logging.getLogger(__name__)

# Tile registers multiply bfloat16 many times faster than vectors do. oneDNN uses them, also where our kernels cannot.
_TILE_FLAG = "amx_bf16"

# With smaller registers, or without fused products, torch is faster than the compiled kernels.
_VECTOR_FLAGS = ("avx2", "fma")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """Kernels and projections for a model on this CPU."""

    kernels: CpuKernels | None
    """None: torch computes."""
    linears: str
    dtype: torch.dtype
    """Dtype of the activations."""

    def bind(self, config: DecoderConfig, store: TorchKvStore) -> CpuOps | TorchOps:
        """Return the operations on a model's pages."""
        if self.kernels is not None and can_attend(config):
            ops: CpuOps | TorchOps = CpuOps(config, store, self.kernels)
        else:
            ops = TorchOps(config, store, self.dtype)
        log_kernels(ops, self.linears)
        return ops


def log_kernels(ops: CpuOps | TorchOps, linears: str) -> None:
    """Say in the log what computes."""
    logger.info("kernels chosen", extra={"operations": ops.name, "linears": linears})


def choose_cpu_kernels(
    weights: DecoderWeights, kernels: CpuKernels | None, depth: DepthParts | None = None
) -> CpuChoice:
    """Put the plain weights into the layout that is fastest on this CPU. Mutates `weights`.

    `kernels` are those of `load_cpu_kernels`; None: torch computes. `depth`: see `pack_projections`.
    """
    dtype = weights.embedding.dtype
    return CpuChoice(kernels=kernels, linears=_pack(weights, kernels, depth), dtype=dtype)


def quantize_and_pack(
    config: DecoderConfig, method: QuantizationMethod, kernels: CpuKernels | None, device: torch.device
) -> Convert:
    """Return the conversion of plain projections by a method, into the kernels' layout where they take it."""
    quantize = quantizer(config, method, device=device)
    if kernels is None:
        return quantize
    pack = grouped_packer(config, kernels)
    return lambda field, projection: pack(field, quantize(field, projection))


def cpu_runs_kernels() -> bool:
    """Whether compiled kernels are used on this processor, where there is a compiler."""
    return all(map(cpu_has, _VECTOR_FLAGS))


def load_cpu_kernels(dtype: torch.dtype) -> CpuKernels | None:
    """Return the compiled kernels for weights of a dtype; None, and a line in the log, where there are none."""
    if dtype not in DTYPES:
        logger.info("plain torch kernels: none are compiled for %s", dtype)
        return None
    if not cpu_runs_kernels():
        logger.info("plain torch kernels: the compiled ones need a CPU with %s", " and ".join(_VECTOR_FLAGS))
        return None
    built = build_kernels()
    if isinstance(built, NotBuilt):
        logger.warning("plain torch kernels, which are slower: %s", built.reason)
        return None
    return _open(built, dtype)


def load_draw_kernel(device: torch.device) -> DrawKernel | None:
    """Return the compiled kernel that draws from logits on a device; None: there is none, and torch does."""
    kernels = load_cpu_kernels(torch.float32) if device.type == "cpu" else None
    return None if kernels is None else compiled_draw(kernels)


def packed_linears(kernels: CpuKernels, weights: DecoderWeights) -> str:
    """Return the name of compiled products with packed weights."""
    has_tiles = kernels.has_tiles() and weights.embedding.dtype is torch.bfloat16
    return "compiled, packed weights" + (", in tiles" if has_tiles else "")


def _open(library: Path, dtype: torch.dtype) -> CpuKernels | None:
    try:
        return CpuKernels(library, dtype)
    except OSError as error:
        logger.warning("plain torch kernels, which are slower: cannot load %s: %s", library, error)
        return None


def _pack(weights: DecoderWeights, kernels: CpuKernels | None, depth: DepthParts | None) -> str:
    """Replace all projections by the fastest kind available; returns its name."""
    is_grouped = any(isinstance(projection, GroupedLinear | PackedLinear) for projection in weights.projections())
    is_plain = not is_grouped and weights.embedding.dtype is torch.bfloat16
    if kernels is not None and can_pack_all(weights):
        has_tiles = kernels.has_tiles() and weights.embedding.dtype is torch.bfloat16
        if not (is_plain and cpu_has(_TILE_FLAG)) or has_tiles:  # else compiled without them
            pack_projections(weights, kernels, depth)
            return packed_linears(kernels, weights)
    if can_pack(weights.embedding):
        widen_weights(weights, lambda linear, span: RoundedInputs(OneDnnLinear(linear), span))
        weights.replace_projections(lambda linear: OneDnnLinear(linear) if isinstance(linear, Linear) else linear)
        return "oneDNN, packed weights"
    widen_weights(weights, RoundedInputs)
    return "torch"
