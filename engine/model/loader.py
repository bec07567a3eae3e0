"""Reads checkpoints into fused weights, or makes random ones, and identifies models by fingerprints."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from common.random_models import SEED_FILE, RandomModel
from engine.model.checkpoints import gguf_file
from engine.model.checkpoints.checkpoint import Checkpoint, is_gguf, open_checkpoint
from engine.model.checkpoints.formats import WeightFormat
from engine.model.checkpoints.fusing import fuse
from engine.weights.config import DecoderConfig, TransformersConfig, UnsupportedModel, read_json
from engine.weights.decoder_weights import HEAD_FIELD, Convert, DecoderWeights, Projection, plain
from engine.weights.grouped import GroupedWeight
from engine.weights.layout import (
    HEAD_MODULE,
    all_projections,
    allocate_weights,
    checkpoint_views,
    complete_norms,
    layer_projections,
)
from engine.weights.quantize import refuse_unless_finite
from engine.weights.random_weights import fill_weights
from engine.weights.ranks import Cut, Rank

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old exports repeat what the config states
MTP_PREFIX = "model.mtp_layers."
"""Begin of the names of draft layers in a model's own checkpoint, which the model does without."""
_OTHER_MTP_PREFIX = "mtp."


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the checkpoint's safetensors files, sorted, its GGUF file, or the seed file of random weights.

    Raises UnsupportedModel when there are none, some are missing, or there are several GGUF files.
    """
    if (model_dir / SEED_FILE).is_file():
        return (model_dir / SEED_FILE,)
    if (model_dir / _INDEX_FILE).is_file():
        weight_map: dict[str, Any] = read_json(model_dir / _INDEX_FILE).get("weight_map") or {}
        files = tuple(model_dir / name for name in sorted(set(weight_map.values())))
    else:
        files = (model_dir / _SINGLE_FILE,)
    missing = [file.name for file in files if not file.is_file()]
    if not missing and files:
        return files
    gguf_files = sorted(model_dir.glob(f"*{gguf_file.SUFFIX}"))
    if len(gguf_files) > 1:
        raise UnsupportedModel(
            f"cannot choose between {', '.join(file.name for file in gguf_files)} in {model_dir}; keep one of them"
        )
    if not gguf_files:
        raise UnsupportedModel(
            f"{', '.join(missing) or 'weights'} missing in {model_dir}; only safetensors and GGUF files are read"
        )
    return tuple(gguf_files)


def load_weights(
    files: Sequence[Path],
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat | None = None,
    convert: Convert | None = None,
) -> DecoderWeights:
    """Return the weights on `device`, in `dtype`; projections that `weight_format` stores in few bits stay in them.

    Copies one projection at a time, so that loading needs no second copy of the model. With `convert`, which gives
    other numbers, each one is converted before the next is read: their plain values never take memory together. Raises
    UnsupportedModel when a tensor is missing, unknown, of another shape, or of a dtype that `weight_format` does not
    explain, and with `convert` also when one holds NaN or infinity.
    """
    return _load(files, config, partial(allocate_weights, config, dtype=dtype, device=device), weight_format, convert)


def load_rank_weights(
    files: Sequence[Path],
    config: DecoderConfig,
    rank: Rank,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stacks_experts: bool = False,
) -> DecoderWeights:
    """Return a rank's part of plain weights; embedding and head are whole. Raises UnsupportedModel."""
    part = rank.config(config)
    allocate = partial(allocate_weights, part, dtype=dtype, device=device, stacks_experts=stacks_experts)
    return _load(files, config, allocate, None, None, rank)


def load_stacked_weights(
    files: Sequence[Path],
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat | None = None,
    convert: Convert | None = None,
) -> DecoderWeights:
    """Return the weights as `load_weights` does, with experts in stacks: see `StackedMoe`, whose are not converted."""
    assert convert is None or config.experts is None, "experts in stacks are plain"
    allocate = partial(allocate_weights, config, dtype=dtype, device=device, stacks_experts=True)
    return _load(files, config, allocate, weight_format, convert)


def _load(
    files: Sequence[Path],
    config: DecoderConfig,
    allocate: Callable[..., DecoderWeights],
    weight_format: WeightFormat | None,
    convert: Convert | None,
    rank: Rank | None = None,
) -> DecoderWeights:
    mine, cuts = (config, {}) if rank is None else (rank.config(config), rank.cuts(config))
    if files[0].name == SEED_FILE:
        weights = allocate()
        fill_weights(weights, _read_seed(files[0]), mine, cuts)
        if convert is not None:
            weights.convert_projections(convert)
        return weights
    with open_checkpoint(files, config, weight_format) as checkpoint:
        modules = set(checkpoint.quantized)
        if rank is not None and modules:
            raise UnsupportedModel(f"cannot cut {min(modules)} among {rank.size} ranks: it is quantized")
        if convert is not None:
            modules |= _projection_modules(config)
        weights = allocate(without=modules)
        _fill_plain(checkpoint, weights, mine, cuts)
        if convert is not None:
            refuse_unless_finite("model.embed_tokens.weight", weights.embedding)
        _install(checkpoint, weights, config, modules, convert)
    return weights


def _projection_modules(config: DecoderConfig) -> set[str]:
    """Return the names of all projections in a checkpoint."""
    modules = {module for projection in all_projections(config) for module in projection.modules}
    return modules if config.has_tied_embeddings else {*modules, HEAD_MODULE}


def _read_seed(path: Path) -> RandomModel:
    try:
        return RandomModel.read(path)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def _fill_plain(
    checkpoint: Checkpoint, weights: DecoderWeights, config: DecoderConfig, cuts: Mapping[str, Cut]
) -> None:
    """Copy all plain tensors, except for those of projections that have quantized parts, to their places.

    `cuts`: what is taken of tensors, by their names; all of others.
    """
    views = checkpoint_views(weights, config)
    pending = {name for name, view in views.items() if not view.is_meta}
    for name in checkpoint.plain:
        if name.endswith(_IGNORED_SUFFIXES) or name.startswith(_draft_prefixes(config)):
            continue
        if name == f"{HEAD_MODULE}.weight" and config.has_tied_embeddings:
            continue
        view = views.get(name)
        if view is None:
            if name.endswith(".bias") and not checkpoint.tensor(name).any():
                continue  # some quantizers give every projection a bias
            raise UnsupportedModel(f"the checkpoint's tensor {name} has no place in this architecture")
        if not view.is_meta:
            cut = cuts.get(name)
            source = _tensor(checkpoint, name, view.shape if cut is None else cut.shape(view.shape))
            view.copy_(source if cut is None else cut.of(source))
            pending.discard(name)
    if pending:
        names = sorted(pending)
        raise UnsupportedModel(f"{len(names)} tensors are missing in the checkpoint, {names[0]} among them")
    complete_norms(weights, config)


def _draft_prefixes(config: DecoderConfig) -> tuple[str, ...]:
    behind = range(config.num_layers, config.num_layers + config.num_draft_layers)
    return MTP_PREFIX, _OTHER_MTP_PREFIX, *(f"model.layers.{layer_idx}." for layer_idx in behind)


def _tensor(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    source = checkpoint.tensor(name)
    if source.shape != shape:
        raise UnsupportedModel(f"{name} has shape {list(source.shape)}, config.json says {list(shape)}")
    return source


def _install(
    checkpoint: Checkpoint,
    weights: DecoderWeights,
    config: DecoderConfig,
    modules: Container[str],
    convert: Convert | None,
) -> None:
    """Read and replace the projections that have one of these modules, which hold all that are quantized.

    Raises UnsupportedModel for modules without a place.
    """
    unknown = {module for module in checkpoint.quantized if not module.startswith(_draft_prefixes(config))}

    def read(module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        unknown.discard(module)
        if module in checkpoint.quantized:
            return checkpoint.weight(module, shape)
        name = f"{module}.weight"
        tensor = _tensor(checkpoint, name, torch.Size(shape))
        if convert is not None:
            refuse_unless_finite(name, tensor)
        return tensor

    def join(names: Sequence[str], rows: Sequence[int], in_features: int, bias: Tensor | None) -> Projection:
        parts = [read(name, (count, in_features)) for name, count in zip(names, rows, strict=True)]
        return fuse(parts, bias, like=weights.embedding)

    def converted(field: str, projection: Projection) -> Projection:
        return projection if convert is None else convert(field, projection)

    for layer_idx, layer in enumerate(weights.layers):
        for place, projection in zip(layer.places(), layer_projections(config, layer_idx), strict=True):
            names = projection.modules
            if any(name in modules for name in names):
                bias = plain(place.get()).bias
                # No name keeps a plain projection while the next one is read.
                place.put(converted(place.field, join(names, projection.rows, projection.in_features, bias)))
    if HEAD_MODULE in modules:
        weights.head = join([HEAD_MODULE], [config.vocab_size], config.hidden_size, None)
    weights.head = converted(HEAD_FIELD, weights.head)
    if unknown:
        raise UnsupportedModel(f"the checkpoint's quantized {min(unknown)} has no place in this architecture")


# Increased with every change of a block's bytes, or of the arithmetic that fills them.
_KV_LAYOUT_VERSION = 4
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
    # A field that a later version adds with a default changes nothing: workers of both versions exchange KV meanwhile.
    changed = [
        (field.name, value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    ]
    essentials = (
        *(_KV_LAYOUT_VERSION, changed, dtype, kv_dtype or dtype, quantization, block_size, content_digest(files)),
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
    """Return a digest of a checkpoint's files, from samples of their weights; for random weights, of their seed file.

    Covers names, shapes and dtypes of all tensors and 4 KiB from the start, middle and end of each: training, merging
    and quantizing change whole tensors. Takes milliseconds; hashing every byte would read the whole model. Raises
    UnsupportedModel when a file is damaged.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        if path.name == SEED_FILE:
            digest.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            extents = gguf_file.tensor_extents(path) if is_gguf([path]) else _safetensors_extents(file, path)
            begins = [begin for begin, _end in extents]
            digest.update(os.pread(file.fileno(), min(begins, default=0), 0))
            for begin, end in extents:
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, end - offset), offset))
    return digest.hexdigest()


def _safetensors_extents(file: BinaryIO, path: Path) -> list[tuple[int, int]]:
    """Return [begin, end) of each tensor in a file; what lies before the first one is the header."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _HEADER_LIMIT_BYTES:
        raise UnsupportedModel(f"{path} is not a safetensors file")
    try:
        tensors = json.loads(file.read(header_bytes))
        places = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
        return [(8 + header_bytes + begin, 8 + header_bytes + end) for begin, end in places]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error
