"""A model of the first layers of the default one: its real weights and tokenizer, in a fraction of the time."""

import json
import shutil
from pathlib import Path

from common.model_files import default_model_dir

NUM_LAYERS = 4
"""Layers, of 30, that it keeps."""
_PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights with a row for each token of the vocabulary."""


def write_short_model(folder: Path, *, num_layers: int = NUM_LAYERS, vocab_size: int | None = None) -> Path:
    """Write the model into a folder and return the folder.

    With `vocab_size` it knows only the first tokens of the vocabulary, whose product is most of a short model's work.
    """
    import safetensors.torch

    whole = default_model_dir()
    for path in whole.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    changes = {"num_hidden_layers": num_layers, "vocab_size": vocab_size or config["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    later = tuple(f"model.layers.{idx}." for idx in range(num_layers, config["num_hidden_layers"]))
    weights = safetensors.torch.load_file(whole / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(later)}
    kept |= {name: kept[name][:vocab_size].clone() for name in _PER_TOKEN if name in kept}
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def cut_tokenizer(folder: Path, vocab_size: int) -> None:
    """Let a short model's tokenizer know no more tokens than the model: the first, and so the shortest, pieces."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {piece: token_id for piece, token_id in model["vocab"].items() if token_id < vocab_size}
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    model["merges"] = [merge for merge in merges if "".join(merge) in model["vocab"]]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
