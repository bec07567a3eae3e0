"""Formats of keys and values in pages.

    plain    the model's dtype, or e4m3 (`engine.weights.quantize`): no scale beside the values
    grouped  the same on CPUs, in the order in which products take them: no decode step moves any
    int8     codes -127 to 127, stored as 1 to 255, and one bfloat16 scale for each token and head
    int4     codes -8 to 7, stored as 0 to 15, and one bfloat16 scale for each token, head and 32 dimensions, which a
             Hadamard matrix mixes first: without it a few large dimensions of the keys take the range of all others.
             Dimensions d and d + 16 of the 32 share a byte, the first in its lower half

A value is read as code * scale, whether it was written in this step or long ago: what a token sees never depends on
chunks, caches or handoffs. A scale has bfloat16's range, so that no key
is too large for it; its own rounding is harmless, since codes are chosen with the rounded scale.

Mixing is orthogonal: mixed queries have the same scores with mixed keys, and a sum of mixed values is mixed back once.
`engine/ops/cpu/codes.h` does the same on compiled kernels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.weights.config import DecoderConfig, TransformersConfig, UnsupportedModel
from engine.weights.precision import dtype_name
from engine.weights.quantize import FP8, check_fp8

KvDtype = Literal["auto", "fp8", "int8", "int4"]
"""Values of `model.kv_dtype`."""

SCALE_DTYPE = torch.bfloat16
TOKEN_GROUP = 16
"""Tokens whose codes, or values in groups, lie together in a page."""
_GROUPED_DTYPES = (torch.float32, torch.bfloat16)  # those of the compiled kernels
_CPU = torch.device("cpu")
_GROUPED = "grouped-"
_GROUPED_DIMS = 32  # of which grouped heads have a multiple: the kernels take no others
_INT8_MAX = 127
_INT8_BIAS = 128
_INT4_MIN = -8
_INT4_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """A format of pages; values apart from their scales are `dtype`."""

    name: str
    """Name in fingerprints and in `KvShape.dtype`."""
    dtype: torch.dtype
    """Dtype of the values; of codes, uint8."""
    is_grouped: bool = False
    """Whether values lie in groups of tokens; see `engine.pages.kv_cache`."""

    @property
    def has_codes(self) -> bool:
        """Whether pages hold codes and scales."""
        return self.name in {"int8", "int4"}

    @property
    def group_size(self) -> int:
        """Tokens of which a head's values lie together."""
        return TOKEN_GROUP if self.is_grouped else 1

    def code_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token's key, or value, of one head, without its scales."""
        return head_dim // 2 if self.name == "int4" else head_dim * self.dtype.itemsize

    def row_scales(self, head_dim: int) -> int:
        """Return the number of scales of one token's key, or value, of one head."""
        if not self.has_codes:
            return 0
        return head_dim // _INT4_GROUP if self.name == "int4" else 1

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token's key, or value, of one head, with its scales."""
        return self.code_bytes(head_dim) + self.row_scales(head_dim) * SCALE_DTYPE.itemsize

    def mix(self, x: Tensor) -> Tensor:
        """Return x [..., head_dim] as the pages hold it before rounding, in its dtype; its own inverse."""
        return _hadamard(x.float()).to(x.dtype) if self.name == "int4" else x

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, uint8 [..., code_bytes], and scales [..., row_scales] of x [..., head_dim]. Only with codes."""
        wide = x.float()
        if self.name == "int8":
            scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MAX).to(SCALE_DTYPE)
            return (_round(wide, scales).clamp_(-_INT8_MAX, _INT8_MAX) + _INT8_BIAS).to(torch.uint8), scales
        groups = _hadamard(wide).view(*x.shape[:-1], -1, _INT4_GROUP)
        most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        # The dimension that stands out most becomes -8.
        scales = (torch.where(most > -least, most, least) / _INT4_MIN).to(SCALE_DTYPE)
        codes = (_round(groups, scales).clamp_(_INT4_MIN, -_INT4_MIN - 1) - _INT4_MIN).to(torch.uint8)
        low, high = codes.chunk(2, dim=-1)
        return (low | high << 4).flatten(-2), scales.squeeze(-1)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [..., head_dim] that codes stand for, still mixed."""
        if self.name == "int8":
            return ((codes.float() - _INT8_BIAS) * scales.float()).to(dtype)
        pairs = codes.view(*codes.shape[:-1], -1, _INT4_GROUP // 2)
        wide = torch.cat((pairs & 15, pairs >> 4), dim=-1).float() + _INT4_MIN
        return (wide * scales.float().unsqueeze(-1)).to(dtype).flatten(-2)


def plain_format(dtype: torch.dtype) -> KvFormat:
    """Return the format of pages without scales."""
    return KvFormat(name=dtype_name(dtype), dtype=dtype)


_CODED = {
    "int8": KvFormat(name="int8", dtype=torch.uint8),
    "int4": KvFormat(name="int4", dtype=torch.uint8),
}


def kv_format(option: KvDtype, dtype: torch.dtype) -> KvFormat:
    """Return the format that `model.kv_dtype` means for a model of this dtype."""
    match option:
        case "auto":
            return plain_format(dtype)
        case "fp8":
            return plain_format(FP8)
        case _:
            return _CODED[option]


def page_format(
    option: KvDtype,
    dtype: torch.dtype,
    config: DecoderConfig | TransformersConfig,
    *,
    block_size: int,
    device: torch.device = _CPU,
) -> KvFormat:
    """Return the format of a model's pages on a device: as `kv_format`, in groups where a CPU's kernels take them."""
    pages = kv_format(option, dtype)
    takes_groups = device.type == "cpu" and pages.dtype in _GROUPED_DTYPES and block_size % TOKEN_GROUP == 0
    if not takes_groups or isinstance(config, TransformersConfig) or config.latent is not None:
        return pages
    return pages if config.head_dim % _GROUPED_DIMS else _grouped_format(pages.dtype)


def format_named(name: str) -> KvFormat:
    """Return the format that `KvShape.dtype` names."""
    if name.startswith(_GROUPED):
        return _grouped_format(getattr(torch, name.removeprefix(_GROUPED)))
    return _CODED.get(name) or plain_format(getattr(torch, name))


def _grouped_format(dtype: torch.dtype) -> KvFormat:
    return KvFormat(name=_GROUPED + dtype_name(dtype), dtype=dtype, is_grouped=True)


def check_kv_format(kv_format: KvFormat, config: DecoderConfig, *, block_size: int, device: torch.device) -> None:
    """Raise UnsupportedModel when the model, block or device does not allow the format. Called before weights load."""
    if kv_format.has_codes and device.type == "cuda":
        raise UnsupportedModel(f"cannot use kv_dtype: {kv_format.name} on a GPU: only CPUs read it; choose fp8 or auto")
    if kv_format.dtype is FP8:
        if device.type != "cuda":
            raise UnsupportedModel("cannot use kv_dtype: fp8 on a CPU: only GPUs read it; choose int8, int4 or auto")
        if config.latent is not None:
            raise UnsupportedModel("cannot use kv_dtype: fp8 with latent attention: rows have no scales; choose auto")
        check_fp8(device)
    if kv_format.has_codes and block_size % TOKEN_GROUP:
        raise UnsupportedModel(
            f"cannot use kv_dtype: {kv_format.name} with block_size: {block_size}: it takes multiples of {TOKEN_GROUP}"
        )
    if kv_format.has_codes and config.head_dim % 4:
        raise UnsupportedModel(
            f"cannot use kv_dtype: {kv_format.name} with heads of {config.head_dim}: it takes multiples of 4;"
            " choose auto"
        )
    if kv_format.name == "int4" and config.head_dim % _INT4_GROUP:
        raise UnsupportedModel(
            f"cannot use kv_dtype: int4 with heads of {config.head_dim}: it takes multiples of {_INT4_GROUP};"
            " choose int8 or auto"
        )


def _round(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scale to the nearest, ties to even; codes of a zero or NaN scale do not matter."""
    wide = scales.float()
    return torch.where(wide.abs() > 0, x / wide, 0.0).round_()


def _hadamard(x: Tensor) -> Tensor:
    """Return float32 x [..., head_dim] with each 32 dimensions multiplied by the normalised Hadamard matrix."""
    matrix = torch.ones((1, 1), dtype=x.dtype, device=x.device)
    while len(matrix) < _INT4_GROUP:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    mixed: Tensor = x.reshape(*x.shape[:-1], -1, _INT4_GROUP) @ (matrix * _INT4_GROUP**-0.5)
    return mixed.flatten(-2)
