"""Reads safetensors checkpoints into fused weights, or makes random ones, and identifies models by fingerprints."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.random_models import SEED_FILE, RandomModel
from engine.model.config import DecoderConfig, TransformersConfig, UnsupportedModel, read_json
from engine.model.random_weights import make_random_weights
from engine.model.weights import DecoderWeights, allocate_weights, checkpoint_views

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old exports repeat what the config states
_SOURCE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the checkpoint's safetensors files, sorted, or the seed file of random weights.

    Raises UnsupportedModel when there are none or some are missing.
    """
    if (model_dir / SEED_FILE).is_file():
        return (model_dir / SEED_FILE,)
    if (model_dir / _INDEX_FILE).is_file():
        weight_map: dict[str, Any] = read_json(model_dir / _INDEX_FILE).get("weight_map", {})
        files = tuple(model_dir / name for name in sorted(set(weight_map.values())))
    else:
        files = (model_dir / _SINGLE_FILE,)
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise UnsupportedModel(
            f"{', '.join(missing) or 'weights'} missing in {model_dir}; only safetensors files are read"
        )
    return files


def load_weights(
    files: Sequence[Path], config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Return the weights in `dtype` on `device`.

    Copies one tensor at a time, so that loading needs no second copy of the model. Raises UnsupportedModel when a
    tensor is missing, unknown, quantized or of another shape.
    """
    if files[0].name == SEED_FILE:
        return make_random_weights(_read_seed(files[0]), config, dtype=dtype, device=device)
    weights = allocate_weights(config, dtype=dtype, device=device)
    pending = checkpoint_views(weights, config)
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a mapping
                    _take(name, checkpoint, pending, config)
        except SafetensorError as error:
            raise UnsupportedModel(f"cannot read {path}: {error}") from error
    if pending:
        names = sorted(pending)
        raise UnsupportedModel(f"{len(names)} tensors are missing in the checkpoint, {names[0]} among them")
    return weights


def _read_seed(path: Path) -> RandomModel:
    try:
        return RandomModel.read(path)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def _take(name: str, checkpoint: Any, pending: dict[str, Tensor], config: DecoderConfig) -> None:
    """Copy one tensor to its place and remove it from `pending`."""
    if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and config.has_tied_embeddings):
        return
    view = pending.pop(name, None)
    if view is None:
        raise UnsupportedModel(f"the checkpoint's tensor {name} has no place in this architecture")
    source: Tensor = checkpoint.get_tensor(name)
    if source.dtype not in _SOURCE_DTYPES:
        raise UnsupportedModel(f"{name} is stored as {source.dtype}; quantized weights are not supported")
    if source.shape != view.shape:
        raise UnsupportedModel(f"{name} has shape {list(source.shape)}, config.json says {list(view.shape)}")
    view.copy_(source)


# Increased with every change of a block's bytes, or of the arithmetic that fills them.
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
    """Return a hash of everything that KV and tokens depend on, beside the request.

    Covers weights, their quantization, decoder, dtypes, block layout, and the library of grammars, another version of
    which may allow other tokens. `kv_dtype` is the pages' dtype; None: that of the weights.
    """
    essentials = (
        *(_KV_LAYOUT_VERSION, config, dtype, kv_dtype or dtype, quantization, block_size, content_digest(files)),
        grammar_library_version(),
    )
    return hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest()


def grammar_library_version() -> str:
    """Return the version of llguidance; empty where it is not installed, and no answer is structured."""
    try:
        return importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return ""


def content_digest(files: Sequence[Path]) -> str:
    """Return a digest of safetensors files, from samples of their weights; for random weights, of their seed file.

    Covers names, shapes and dtypes of all tensors and 4 KiB from the start, middle and end of each: training, merging
    and quantizing change whole tensors. Takes milliseconds; hashing every byte would read the whole model. Raises
    UnsupportedModel when a file is not safetensors.
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
    """Yield each tensor's [begin, end) in the bytes after the header."""
    try:
        tensors = json.loads(header)
        for name, tensor in tensors.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                yield begin, end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error
