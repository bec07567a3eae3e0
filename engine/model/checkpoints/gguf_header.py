"""Headers of GGUF files by the package `gguf`, which is optional: import this module where a file is opened."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from engine.weights.config import UnsupportedModel


def read_header(path: Path) -> GGUFReader:
    """Return the reader of a file, whose tensors stay on disk until they are used. Raises UnsupportedModel."""
    try:
        return _HeaderReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, RecursionError, struct.error) as error:
        raise UnsupportedModel(f"cannot read {path}: {error}") from error


class _HeaderReader(GGUFReader):
    """Skips the contents of arrays: for a tokenizer's, gguf makes several objects per token, which takes seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        is_native = self.byte_order == "I"
        if raw_type != GGUFValueType.ARRAY or not is_native:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        begin = orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(GGUFValueType(item_type[0]))
        if scalar is not None:
            end = begin + int(length[0]) * np.dtype(scalar).itemsize
        elif item_type[0] == GGUFValueType.STRING:
            end = _end_of_strings(self.data.data, begin, int(length[0]))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [item_type, length], [], [GGUFValueType.ARRAY]


def _end_of_strings(data: memoryview, begin: int, count: int) -> int:
    """Return the end of strings that are each preceded by their length."""
    for _ in range(count):
        (num_bytes,) = struct.unpack_from("=Q", data, begin)
        begin += 8 + num_bytes
    return begin
