"""Windows of layers, as config.json describes them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from engine.weights.architectures import Architecture
from engine.weights.config_json import MAX_LAYERS, UnsupportedModel, positive
from engine.weights.nope import nope_layers
from engine.window import Window

_DEFAULT_MAX_WINDOW_LAYERS = 28
_AnyWindow = TypeVar("_AnyWindow")


def parse_windows(raw: Mapping[str, Any], architecture: Architecture) -> tuple[Window | None, ...]:
    """Return the window of each layer. Raises UnsupportedModel, naming the unsupported feature."""
    if architecture.default_chunk_size is not None:
        return _chunks(raw, architecture, architecture.default_chunk_size)
    sizes = _sliding(raw, architecture)
    return tuple(None if size is None else Window(num_tokens=size) for size in sizes)


def _chunks(raw: Mapping[str, Any], architecture: Architecture, default_size: int) -> tuple[Window | None, ...]:
    chunk = Window(num_tokens=positive(raw, "attention_chunk_size", default=default_size), is_chunk=True)
    num_layers = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)
    if raw.get("layer_types"):
        return _by_type(raw["layer_types"], num_layers, "chunked_attention", chunk)
    unrotated = nope_layers(raw, architecture)
    return tuple(None if layer_idx in unrotated else chunk for layer_idx in range(num_layers))


def _sliding(raw: Mapping[str, Any], architecture: Architecture) -> tuple[int | None, ...]:
    num_layers = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS)
    if architecture.has_window:
        is_dropped = architecture.can_drop_window and not raw.get("use_sliding_window")
        window = None if is_dropped else raw.get("sliding_window", architecture.default_window)
        return (window or None,) * num_layers
    if not architecture.has_layer_types:
        return (None,) * num_layers
    pattern = architecture.window_pattern
    if pattern is not None:
        window = positive(raw, "sliding_window", default=architecture.default_window)
    elif raw.get("use_sliding_window"):
        window = raw.get("sliding_window", architecture.default_window) or None
    else:
        window = None
    layer_types = raw.get("layer_types")
    if layer_types is None and pattern is not None:
        pattern = positive(raw, "sliding_window_pattern", default=pattern)
        return tuple(window if (layer_idx + 1) % pattern else None for layer_idx in range(num_layers))
    if layer_types is None:
        first_windowed = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if architecture.has_alternating_windows:
            return tuple(window if i < first_windowed and i % 2 == 0 else None for i in range(num_layers))
        return tuple(window if layer_idx >= first_windowed else None for layer_idx in range(num_layers))
    return _by_type(layer_types, num_layers, "sliding_attention", window)


def _by_type(
    layer_types: Sequence[str], num_layers: int, kind: str, window: _AnyWindow
) -> tuple[_AnyWindow | None, ...]:
    """Return the window of each layer of a kind, and None for those of full attention."""
    unknown = sorted(set(layer_types) - {"full_attention", kind})
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")
    if len(layer_types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(layer_types)} layers of {num_layers}")
    return tuple(window if each == kind else None for each in layer_types)
