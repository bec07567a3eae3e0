"""Says when two workers' KV blocks are exchangeable."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.random_models import SEED_FILE
from engine.model.config import DecoderConfig, UnsupportedModel
from engine.model.transformers_config import TransformersConfig

# Raised whenever the bytes of a block, or the arithmetic that fills them, change.
_KV_LAYOUT_VERSION = 1
_SAMPLE_BYTES = 4096
_HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own


def kv_fingerprint(
    config: DecoderConfig | TransformersConfig,
    files: Sequence[Path],
    *,
    dtype: str,
    block_size: int,
    quantization: str | None = None,
    kv_dtype: str | None = None,
) -> str:
    """Return a hash of everything that makes KV differ: weights, their quantization, decoder, dtypes, block layout.

    `kv_dtype` is the pages', None when it is the weights'.
    """
    essentials = (_KV_LAYOUT_VERSION, config, dtype, kv_dtype or dtype, quantization, block_size, content_digest(files))
    return hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest()


def content_digest(files: Sequence[Path]) -> str:
    """Return a digest of safetensors files that is equal when, as far as samples tell, the weights are equal.

    Covers names, shapes and dtypes of all tensors and 4 KiB from the start, middle and end of each: whoever trains,
    merges or quantizes changes whole tensors. Costs milliseconds where hashing every byte costs a reading of the model.
    Of random weights it is a digest of what makes them. Raises UnsupportedModel when a file is not safetensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        if path.name == SEED_FILE:
            digest.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _HEADER_LIMIT_BYTES:
                raise UnsupportedModel(f"{path} is not a safetensors file")
            header = file.read(header_bytes)
            digest.update(header)
            for begin, end in _extents(header, path):
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    sample_bytes = min(_SAMPLE_BYTES, end - offset)
                    digest.update(os.pread(file.fileno(), sample_bytes, 8 + header_bytes + offset))
    return digest.hexdigest()


def _extents(header: bytes, path: Path) -> Iterator[tuple[int, int]]:
    """Yield each tensor's [begin, end) in the bytes behind the header."""
    try:
        tensors = json.loads(header)
        for name, tensor in tensors.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield begin, end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error
