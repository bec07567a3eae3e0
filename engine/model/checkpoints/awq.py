"""AWQ checkpoints, as AutoAWQ writes them for its GEMM kernel.

A module of `in` inputs and `out` outputs has

    qweight  int32 [in, out / 8]       codes of 4 bits, packed along the outputs
    qzeros   int32 [groups, out / 8]   zero points, packed likewise
    scales   float16 [groups, out]

The value of a weight is scale * (code - zero). Within a word, the outputs lie in the order 0 2 4 6 1 3 5 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.model.checkpoints.formats import supported
from engine.model.checkpoints.packing import codes_per_word, expect_shape, grid, unpack_words
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight

_BITS = 4
_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """A `WeightFormat`."""

    group_size: int
    """Inputs that share a scale; -1: all."""

    method = "awq"
    marker = "qweight"
    parts = ("qweight", "qzeros", "scales")
    ignored = ()

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `WeightFormat`."""
        out_features, in_features = shape
        num_words = -(-out_features // codes_per_word(_BITS))
        group_size = in_features if self.group_size == -1 else self.group_size
        num_groups = -(-in_features // group_size)
        expect_shape("qweight", parts["qweight"], (in_features, num_words))
        expect_shape("qzeros", parts["qzeros"], (num_groups, num_words))
        expect_shape("scales", parts["scales"], (num_groups, out_features))
        codes, zeros = (_by_output(parts[name])[:out_features] for name in ("qweight", "qzeros"))
        return grid(_BITS, codes, parts["scales"].t(), zeros, group_size=group_size)


def _by_output(words: Tensor) -> Tensor:
    """Return packed codes [n, out / 8] as uint8 [out, n]."""
    return unpack_words(words, _BITS)[..., _PLACE_OF_OUTPUT].flatten(1).t()


def read_format(config: Mapping[str, Any]) -> AwqFormat:
    """Return the format that a `quantization_config` describes. Raises UnsupportedModel."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's own, in files that transformers did not write
    config = {"zero_point": True, **{names.get(key, key): value for key, value in config.items()}}
    supported(config, "bits", (_BITS,))
    supported(config, "zero_point", (True,))
    key = "version" if config.get("version") else "format"
    supported({key: str(config.get(key) or "gemm").lower()}, key, ("gemm",))
    group_size = config.get("group_size")
    if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise UnsupportedModel(f"quantization_config.group_size: {group_size!r} is neither positive nor -1")
    return AwqFormat(group_size=group_size)
