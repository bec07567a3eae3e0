"""Checkpoints with the layers of a published model, a few of them, and random weights, which every engine can read.

    python -m benchmarks.shapes qwen3-30b-a3b --layers 3 FOLDER

Large models differ from small ones in the sizes of their products, and in little else: a few layers of the real sizes
show the speed of an engine beside another's where the whole model has no room. FOLDER then goes to `--model` of
`benchmarks.engine` and `benchmarks.forward_pass`. The head and the embedding are whole, so they weigh more than in the
model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from common.model_files import ModelNotFound, resolve_model
from common.random_models import CONFIGS, RANDOM_PREFIX, SEED_FILE
from engine.weights.config import parse_config, read_json
from engine.weights.layout import allocate_weights, checkpoint_views
from engine.weights.random_weights import fill_random, initializer_range

_BY_LAYER = ("layer_types", "no_rope_layers", "moe_layers", "mlp_layer_types")


def shortened(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config.json with the first layers alone."""
    lists = {key: raw[key][:num_layers] for key in _BY_LAYER if isinstance(raw.get(key), list)}
    return raw | lists | {"num_hidden_layers": num_layers}


def write_shape(source: Path, raw: dict[str, Any], folder: Path) -> int:
    """Write a checkpoint in bfloat16 with the tokenizer of `source`. Returns its bytes."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in {"config.json", SEED_FILE}:
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    config = parse_config(raw)
    weights = allocate_weights(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    tensors = checkpoint_views(weights, config)
    fill_random(tensors, seed=0, std=initializer_range(raw))
    # A file holds no views of one storage, so each tensor is copied.
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return sum(tensor.nbytes for tensor in tensors.values())


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(CONFIGS), help="a model of `random:`")
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--layers", type=int, required=True, help="first layers of the model to write")
    args = parser.parse_args()
    if args.layers < 1:
        parser.error("--layers must be at least 1")
    try:
        source = resolve_model(f"{RANDOM_PREFIX}{args.name}", local_files_only=True)
        num_bytes = write_shape(source, shortened(read_json(source / "config.json"), args.layers), args.folder)
    except (FileExistsError, ModelNotFound) as error:
        parser.error(str(error))
    Console().print(f"{args.folder}: {num_bytes / (1 << 30):.1f} GiB")


if __name__ == "__main__":
    main()
