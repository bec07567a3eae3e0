"""Reads safetensors checkpoints, single or sharded, straight into fused weights; or makes random ones there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.random_models import SEED_FILE, RandomModel
from engine.model.config import DecoderConfig, UnsupportedModel, read_json
from engine.model.random_weights import make_random_weights
from engine.model.weights import DecoderWeights, allocate_weights, checkpoint_views

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old exports carry what the config says already
_SOURCE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the checkpoint's safetensors files, sorted, or the one that stands for random weights.

    Raises UnsupportedModel when there are none or some lack.
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
        raise UnsupportedModel(f"{model_dir} lacks {', '.join(missing) or 'weights'}; only safetensors are read")
    return files


def load_weights(
    files: Sequence[Path], config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Return the weights in `dtype` on `device`.

    One tensor at a time is copied into its place, so that loading takes no second copy of the model. Raises
    UnsupportedModel when a tensor is missing, unknown, quantized or of another shape.
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
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if pending:
        names = sorted(pending)
        raise UnsupportedModel(f"the checkpoint lacks {len(names)} tensors, {names[0]} among them")
    return weights


def _read_seed(path: Path) -> RandomModel:
    try:
        return RandomModel.read(path)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def _take(name: str, checkpoint: Any, pending: dict[str, Tensor], config: DecoderConfig) -> None:
    """Copy one tensor to where it belongs and cross it off."""
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
