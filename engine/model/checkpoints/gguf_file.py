"""GGUF files, llama.cpp's, beside a tokenizer in Hugging Face's form.

The package `gguf` reads the container, and values of types that do not fit the layout of grouped weights. Its numbers
come by names of llama.cpp, and for the architecture "llama" with the rows of queries and keys in another order: there,
rotary embedding turns neighbouring rows, here rows that are half a head apart.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.model.checkpoints.gguf_blocks import GROUPED_TYPES, unpack_blocks
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight
from engine.weights.layout import HEAD_MODULE

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SUFFIX = ".gguf"

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": f"{HEAD_MODULE}.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IGNORED = frozenset({"rope_freqs.weight"})  # repeats what config.json says of rotary frequencies
_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether the rows of queries and keys are in another order, by `general.architecture`."""


class GgufCheckpoint:
    """A `Checkpoint` in one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the file's header. Raises UnsupportedModel."""
        reader = open_header(path)
        name = field_value(reader, "general.architecture")
        if not isinstance(name, str) or name not in _PERMUTED:
            raise UnsupportedModel(
                f"{path.name}: general.architecture: {name!r} is not supported; supported are {', '.join(_PERMUTED)}"
            )
        self._path = path
        self.has_interleaved_pairs = _PERMUTED[name]
        """Whether rows of queries and keys are to be read through `PairedRows`."""
        self._tensors = {_hf_name(each.name): each for each in reader.tensors if each.name not in _IGNORED}
        grouped = {
            name.removesuffix(".weight")
            for name, each in self._tensors.items()
            if each.tensor_type.name in GROUPED_TYPES and name.endswith(("_proj.weight", f"{HEAD_MODULE}.weight"))
        }
        embedding = self._tensors.get(_OUTER_NAMES["token_embd.weight"])
        if f"{HEAD_MODULE}.weight" not in self._tensors and embedding and embedding.tensor_type.name in GROUPED_TYPES:
            # Tied: the head multiplies with the embedding's own bits; looking tokens up takes plain rows.
            self._tensors[f"{HEAD_MODULE}.weight"] = embedding
            grouped.add(HEAD_MODULE)
        self.quantized: Collection[str] = grouped
        self.plain: Collection[str] = [name for name in self._tensors if name.removesuffix(".weight") not in grouped]

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint`. Types of few bits come in float32."""
        from gguf.quants import dequantize

        stored = self._stored(name)
        if stored.tensor_type.name in ("F64", "F32", "F16"):
            values = stored.data
        else:
            try:
                values = dequantize(stored.data, stored.tensor_type)
            except NotImplementedError:
                kind = stored.tensor_type.name
                raise UnsupportedModel(
                    f"{self._path.name}: {name} is stored as {kind}, which is not supported"
                ) from None
            except ValueError as error:
                raise UnsupportedModel(f"cannot read {name} in {self._path.name}: {error}") from error
        return torch.from_numpy(np.array(values))

    def weight(self, module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `Checkpoint`."""
        name = f"{module}.weight"
        stored = self._stored(name)
        found = tuple(int(size) for size in reversed(stored.shape))
        if found != shape:
            raise UnsupportedModel(f"{name} has shape {list(found)}, config.json says {list(shape)}")
        return unpack_blocks(stored.tensor_type.name, torch.from_numpy(np.array(stored.data)), shape)

    def _stored(self, name: str) -> "ReaderTensor":
        try:
            return self._tensors[name]
        except KeyError:
            raise UnsupportedModel(f"{name} is missing in the checkpoint") from None


def _hf_name(name: str) -> str:
    """Return a tensor's name in a Hugging Face checkpoint; its own when it has none there."""
    if match := _LAYER_NAME.fullmatch(name):
        layer_idx, part, kind = match.groups()
        return f"model.layers.{layer_idx}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    return _OUTER_NAMES.get(name, name)


def open_header(path: Path) -> "GGUFReader":
    """Return the reader of a file. Raises UnsupportedModel."""
    try:
        from engine.model.checkpoints.gguf_header import read_header
    except ImportError as error:
        raise UnsupportedModel(f"cannot read {path.name}: {error}; install the `gguf` extra: kvrelay[gguf]") from error
    return read_header(path)


def field_value(reader: "GGUFReader", key: str) -> Any:
    """Return what a field of the header says; None without the field. Raises UnsupportedModel."""
    field = reader.fields.get(key)
    try:
        return field.contents() if field is not None else None
    except (IndexError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{key}: its value in the GGUF file is damaged: {error}") from error


def tensor_extents(path: Path) -> list[tuple[int, int]]:
    """Return [begin, end) of each tensor in a file; what lies before the first one is the header."""
    return [(each.data_offset, each.data_offset + int(each.n_bytes)) for each in open_header(path).tensors]


def quantized_types(path: Path) -> list[str]:
    """Return the names of the types of few bits in a file."""
    names = {each.tensor_type.name for each in open_header(path).tensors}
    return sorted(names - {"F64", "F32", "F16", "BF16"})
