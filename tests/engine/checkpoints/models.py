"""Tiny checkpoints with quantized projections, beside plain models of the same values."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.model.checkpoints.quantization_config import read_weight_format
from engine.model.loader import load_weights, weight_files
from engine.options import EngineOptions, ModelDescription
from engine.weights.config import DecoderConfig, parse_config, read_json
from engine.weights.decoder_weights import DecoderWeights
from tests.engine.checkpoints.packers import Grid, make_grid
from tests.engine.tiny_models import make_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CPU = torch.device("cpu")


def projections(model: Any) -> dict[str, nn.Linear]:
    """Return the linear modules of all layers by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name
    }


def save_quantized(
    folder: Path,
    quantization_config: Mapping[str, Any],
    pack: Callable[[Grid], Mapping[str, Tensor]],
    *,
    name: str = "llama-attention-bias",
    plain: Callable[[str], bool] = lambda _module: False,
    sizes: Mapping[str, Any] = SIZES,
    **grid: Any,
) -> Any:
    """Save a tiny model with projections packed by `pack`; returns the plain model of the same values.

    Modules for which `plain` is true, the head and the embedding stay as they are. Weights are in two files.
    """
    model = make_model(name, **sizes)
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for seed, (module, linear) in enumerate(projections(model).items()):
        if plain(module):
            continue
        packed = make_grid((linear.out_features, linear.in_features), seed=seed, **grid)
        with torch.no_grad():
            linear.weight.copy_(packed.values())
        del tensors[f"{module}.weight"]
        tensors |= {f"{module}.{part}": tensor for part, tensor in pack(packed).items()}
    names = {"architectures": [type(model).__name__], "quantization_config": dict(quantization_config)}
    config = {**model.config.to_dict(), **names}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    keys = sorted(tensors)
    shards = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for file, kept in shards.items():
        save_file({key: tensors[key].contiguous() for key in kept}, folder / file)
    index = {"weight_map": {key: file for file, kept in shards.items() for key in kept}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def load(
    folder: Path, dtype: torch.dtype = torch.float32, *, read: Callable[..., DecoderWeights] = load_weights
) -> tuple[DecoderWeights, DecoderConfig]:
    """Return a checkpoint's weights as the engine loads them; `read` is the function that does."""
    raw = read_json(folder / "config.json")
    config, weight_format = parse_config(raw), read_weight_format(raw)
    files = weight_files(folder)
    return read(files, config, dtype=dtype, device=CPU, weight_format=weight_format), config


def describe(folder: Path, **options: Any) -> ModelDescription:
    """Return what the engine reads of a checkpoint before it loads the weights."""
    sizes: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    return ModelDescription.read(EngineOptions(**{"model_dir": folder, "model_name": "tiny", **sizes, **options}))
