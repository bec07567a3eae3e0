"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A module of `in` inputs and `out` outputs has, with c = 32 / bits codes in a word,

    qweight  int32 [in / c, out]       codes, packed along the inputs
    qzeros   int32 [groups, out / c]   zero points, packed along the outputs
    scales   float16 [groups, out]
    g_idx    int32 [in]                group of each input; out of order with act-order (`desc_act`)

The value of a weight is scale * (code - zero). The older checkpoint format, `gptq`, stores each zero point less one,
subtracted from the whole word, so that one is added to the word again; `gptq_v2` stores it as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.formats import supported
from engine.model.checkpoints.packing import (
    codes_per_word,
    expect_shape,
    grid,
    is_in_order,
    scatter_groups,
    unpack_words,
)
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight

_ONE_IN_EACH_FIELD = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """A `WeightFormat`."""

    bits: int
    group_size: int
    """Inputs that share a scale; -1: all."""
    stores_zeros_less_one: bool

    method = "gptq"
    marker = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    ignored = ()

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `WeightFormat`. Groups out of order give a plain tensor."""
        out_features, in_features = shape
        per_word = codes_per_word(self.bits)
        group_size = in_features if self.group_size == -1 else self.group_size
        num_groups = -(-in_features // group_size)
        words, scales = parts["qweight"], parts["scales"]
        expect_shape("qweight", words, (-(-in_features // per_word), out_features))
        expect_shape("scales", scales, (num_groups, out_features))
        expect_shape("qzeros", parts["qzeros"], (num_groups, -(-out_features // per_word)))
        codes = unpack_words(words, self.bits).permute(1, 0, 2).flatten(1)[:, :in_features]
        zeros = self._zeros(parts["qzeros"])[:out_features]
        group_of_input = parts.get("g_idx")
        if group_of_input is not None:
            expect_shape("g_idx", group_of_input, (in_features,))
            if not is_in_order(group_of_input, group_size):
                return scatter_groups(codes, scales.t(), zeros, group_of_input)
        return grid(self.bits, codes, scales.t(), zeros, group_size=group_size)

    def _zeros(self, words: Tensor) -> Tensor:
        """Return the zero points [out_features, num_groups]."""
        if self.stores_zeros_less_one:
            words = words + torch.tensor(_ONE_IN_EACH_FIELD[self.bits], dtype=words.dtype)
        return unpack_words(words, self.bits).flatten(1).t()


def read_format(config: Mapping[str, Any]) -> GptqFormat:
    """Return the format that a `quantization_config` describes. Raises UnsupportedModel."""
    bits = supported(config, "bits", (4, 8))
    group_size = config.get("group_size", -1)
    if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise UnsupportedModel(f"quantization_config.group_size: {group_size!r} is neither positive nor -1")
    key = "checkpoint_format" if config.get("checkpoint_format") else "format"
    layout = supported({key: "gptq", **{k: v for k, v in config.items() if v}}, key, ("gptq", "gptq_v2"))
    supported({"pack_dtype": "int32", **config}, "pack_dtype", ("int32", None))
    for pattern in config.get("dynamic") or ():
        if not pattern.startswith("-:"):  # a minus keeps modules plain; others give them a format of their own
            raise UnsupportedModel(f"quantization_config.dynamic: {pattern!r} is not supported; supported is -:")
    return GptqFormat(bits=bits, group_size=group_size, stores_zeros_less_one=layout == "gptq")
