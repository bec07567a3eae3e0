"""Writes the tables of models into documents, from the code that serves them.

    python -m engine.model.tables docs/serving.md

A table stands under a line `<!-- models: NAME -->`: `decoder`, the architectures of our own decoder, or `bytes`, what
the pages of published shapes take.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from common.random_models import CONFIGS, RANDOM_PREFIX
from engine.kv_store import KvShape
from engine.pages.kv_cache import kv_shape, windowed_layers
from engine.weights.architectures import ARCHITECTURES, Architecture
from engine.weights.config import DecoderConfig, is_native, parse_config

_TABLE = re.compile(r"(<!-- models: (\w+) -->\n)(?:\|.*\n)*")
_BLOCK_SIZE = 16


def write_tables(text: str) -> str:
    """Return a document with its tables of models written anew. Raises KeyError for a table that does not exist."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]), text)


def _table(name: str) -> str:
    rows = {"decoder": _architectures, "bytes": _bytes}[name]()
    head, *body = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, "|" + "---|" * head.count(" | ") + "---|\n", *body])


def _architectures() -> Iterator[tuple[str, ...]]:
    yield "architecture in config.json", "layers", "computed on"
    for name, architecture in ARCHITECTURES.items():
        devices = [
            device.upper() if device == "cpu" else "GPU"
            for device in ("cpu", "cuda")
            if is_native({"architectures": [name]}, device)
            and (device == "cpu" or architecture.default_nope_interval is None)
        ]
        yield f"`{name}`", ", ".join(_layers_of(architecture)), ", ".join(devices)


def _layers_of(architecture: Architecture) -> Iterator[str]:
    """Yield what an architecture's layers may have."""
    yield "latent attention" if architecture.has_latent_attention else "attention"
    if architecture.has_window or architecture.has_layer_types or architecture.window_pattern:
        yield "windows"
    if architecture.default_chunk_size:
        yield "chunked attention"
    if architecture.has_sinks:
        yield "sinks"
    if architecture.recurrence is not None:
        yield str(architecture.recurrence.value).partition(",")[0]
    if (experts := architecture.experts) is not None:
        yield "experts" if experts.shared is None else "experts, a shared one among them"


def _bytes() -> Iterator[tuple[str, ...]]:
    yield "model", "its pages hold, for a token", "bytes of a token", "behind all windows", "bytes of a state page"
    for name, raw in CONFIGS.items():
        if not name.startswith("tiny"):
            config = parse_config(raw)
            windowed = windowed_layers(config, config.max_position_embeddings)
            shape = kv_shape(config, block_size=_BLOCK_SIZE, dtype=torch.bfloat16, fingerprint="", windowed=windowed)
            state = f"{shape.window_page_bytes:,}" if shape.state_layers else ""
            sizes = (shape.bytes_per_token, shape.block_bytes // _BLOCK_SIZE)
            yield f"`{RANDOM_PREFIX}{name}`", _content(config, shape), *(f"{size:,}" for size in sizes), state


def _content(config: DecoderConfig, shape: KvShape) -> str:
    num_layers = config.num_layers - len(shape.state_layers)
    rows = f"keys and values of {config.num_kv_heads} heads" if config.latent is None else "a latent row"
    windows = f", {len(shape.window_layers)} of them with a window" if shape.window_layers else ""
    states = f"; {len(shape.state_layers)} layers have states" if shape.state_layers else ""
    return f"{rows} in {num_layers} layers{windows}{states}"


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        each.write_text(write_tables(each.read_text(encoding="utf-8")), encoding="utf-8")
