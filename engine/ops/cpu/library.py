"""The compiled kernels as Python functions over addresses. Calls release the GIL.

The library is loaded after torch; when both use the same OpenMP runtime (GNU's, in torch's own wheels), the process has
one pool of threads. Each thread that calls kernels sets how many of them work: `use_threads`.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, cast

import torch

from engine.pages.kv_format import KvFormat
from engine.weights.architectures import Activation

DTYPES = (torch.float32, torch.bfloat16)

ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.RELU2: 2}
"""Numbers of `Activation` in elementwise.h."""
_CODED_PAGES = {"int8": 2, "int4": 3}


def page_format(pages: KvFormat) -> int:
    """Return the number of `PageFormat` of codes.h."""
    return _CODED_PAGES.get(pages.name, int(pages.is_grouped))


class Step(ctypes.Structure):
    """`Step` of attention.h: one step's batch. The addresses must outlive the calls."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("num_tokens", "num_seqs", "num_heads", "num_kv_heads", "head_dim", "rope_dim", "block_size")
        ),
        *(
            (name, c_void_p)
            for name in (
                *("slot_mapping", "mirror_start_loc", "mirror_slots", "query_start_loc", "context_lens"),
                "block_tables",
            )
        ),
        ("activation", c_int64),
        ("scale", c_float),
        ("norm_eps", c_float),
        *((name, c_int64) for name in ("num_page_heads", "first_page_head")),
    ]


class Layer(ctypes.Structure):
    """`Layer` of paged.h: one layer's pages, norms, sinks and rotations; a window of 0 tokens means none."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "q_norm", "k_norm", "sinks", "cos", "sin", "query_factors")),
        *((name, c_int64) for name in ("window_tokens", "has_chunks", "page_format")),
    ]


class States(ctypes.Structure):
    """`States` of recurrent.h."""

    _fields_ = [*((name, c_void_p) for name in ("pages", "sources", "targets")), ("size", c_int64)]


class Convolution(ctypes.Structure):
    """`Convolution` of recurrent.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("channels", "taps")),
    ]


class Features(ctypes.Structure):
    """`Features` of delta.h."""

    _fields_ = [(name, c_int64) for name in ("begin", "stride")]


class Delta(ctypes.Structure):
    """`Delta` of delta.h."""

    _fields_ = [
        ("convolution", Convolution),
        *((name, c_void_p) for name in ("step_bias", "log_decay", "norm")),
        *((name, c_int64) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim")),
        *((name, Features) for name in ("query", "key", "value", "gate", "rate", "decay")),
        ("row_size", c_int64),
    ]


class Mamba(ctypes.Structure):
    """`Mamba` of mamba.h."""

    _fields_ = [
        ("convolution", Convolution),
        *((name, c_void_p) for name in ("step_bias", "log_decay", "skip", "norm")),
        *((name, c_int64) for name in ("num_heads", "head_dim", "num_groups", "state_dim")),
        *((name, c_float) for name in ("least_step", "largest_step")),
    ]


class MambaScratch(ctypes.Structure):
    """`MambaScratch` of mamba.h."""

    _fields_ = [(name, c_void_p) for name in ("vectors", "results")]


class GroupedCodes(ctypes.Structure):
    """`Grouped` of grouped.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "offsets")),
        *((name, c_int64) for name in ("bits", "scale_bits", "group_blocks", "in_tiles")),
    ]


class Ranks(ctypes.Structure):
    """`Ranks` of ranks.h."""

    _fields_ = [
        *((name, c_int64) for name in ("rank", "size")),
        ("shared", c_void_p),
        *((name, c_int64) for name in ("buffer_size", "num_exchanges")),
    ]


class PackedWeight(ctypes.Structure):
    """`Projection` of projection.h: `packed` numbers, or `grouped` codes."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias")),
        *((name, c_int64) for name in ("columns", "depth")),
        ("grouped", GroupedCodes),
        ("num_segments", c_int64),
        ("ranks", POINTER(Ranks)),
    ]


class PackedExperts(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = [
        ("router", PackedWeight),
        *((name, POINTER(PackedWeight)) for name in ("gate_up", "down")),
        *(
            (name, c_int64)
            for name in (
                *("num_experts", "num_chosen", "has_normalised_weights", "has_sigmoid_scores"),
                *("has_weighted_inputs", "has_shared"),
            )
        ),
        *((name, c_float) for name in ("steepness", "limit")),
    ]


class PackedLayer(ctypes.Structure):
    """`LayerWeights` of layer.h."""

    _fields_ = [
        *((name, PackedWeight) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", POINTER(PackedExperts)),
        *(
            (name, c_void_p)
            for name in ("post_attention_norm", "next_norm", "attention_output_norm", "mlp_output_norm")
        ),
        ("residual_scale", c_float),
    ]


class Activations(ctypes.Structure):
    """`Activations` of layer.h."""

    _fields_ = [
        (name, c_void_p) for name in ("residual", "normed", "projected", "qkv", "attended", "gate_up", "expanded")
    ]


class Draws(ctypes.Structure):
    """`Draws` of draw.h."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("logits", "peak", "temperature", "top_k", "top_p", "min_p", "keys", "token_ids")
        ),
        *((name, c_int64) for name in ("rows", "size")),
    ]


class CpuKernels:
    """The kernels for one number format. Arguments are addresses (`Tensor.data_ptr()`) and counts; see kernels.cpp."""

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        """Load the library. Raises OSError when the system cannot, and ValueError for an unknown dtype."""
        if dtype not in DTYPES:
            raise ValueError(f"there are no CPU kernels for {dtype}")
        self.dtype = dtype
        loaded = ctypes.CDLL(str(library))
        suffix = str(dtype).removeprefix("torch.")

        def declare(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(loaded, f"kvrelay_{name}")
            found.argtypes, found.restype = arguments, result
            return cast(Callable[..., Any], found)

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            return declare(f"{name}_{suffix}", result, *arguments)

        address, count = c_void_p, c_int64
        self.use_threads = declare("use_threads", None, count)
        """Sets the number of threads for kernels that the calling thread starts."""
        self.num_threads: Callable[[], int] = declare("num_threads", c_int64)
        self.has_tiles: Callable[[], bool] = declare("has_tiles", c_bool)
        """Whether products of bfloat16 inputs run in tile registers."""
        self.draw = declare("draw", None, POINTER(Draws))
        self.shared_size: Callable[[int], int] = declare("shared_size", c_int64, count)
        """Bytes that ranks share, by the floats of one of their buffers."""
        self.abort_ranks = declare("abort_ranks", None, POINTER(Ranks))
        """Lets every rank go on without the others, with wrong numbers. Any thread."""
        self.is_aborted: Callable[[Any], bool] = declare("is_aborted", c_bool, POINTER(Ranks))
        self.codes_size = declare("codes_size", c_int64, count, count, count)
        self.pack_codes = declare("pack_codes", None, address, address, *(count,) * 4)
        self.packed_size = function("packed_size", c_int64, count, count)
        self.pack = function("pack", None, address, address, count, count)
        self.linear = function("linear", None, POINTER(PackedWeight), address, address, count)
        self.wide_linear = function("wide_linear", None, POINTER(PackedWeight), address, address, count)
        self.gather_columns = function(
            "gather_columns", None, POINTER(PackedWeight), POINTER(Ranks), address, address, count, count
        )
        self.rms_norm = function("rms_norm", None, address, address, address, count, count, c_float)
        self.add_rms_norm = function("add_rms_norm", None, *(address,) * 4, count, count, c_float)
        self.gate_mul = function("gate_mul", None, count, address, address, count, count)
        self.attend = function("attend", None, POINTER(Step), POINTER(Layer), address, address)
        self.gate_heads = function("gate_heads", None, address, address, count, count)
        self.run_delta = function("run_delta", None, POINTER(Step), POINTER(States), POINTER(Delta), address, address)
        self.run_mamba = function(
            "run_mamba", None, POINTER(Step), POINTER(States), POINTER(Mamba), address, address, POINTER(MambaScratch)
        )
        self.run_layer = function(
            "run_layer", None, POINTER(Step), POINTER(Layer), POINTER(PackedLayer), POINTER(Activations)
        )
