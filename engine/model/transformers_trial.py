"""Finds an architecture's demands on attention by one forward pass without weights.

transformers has some two hundred decoders, each with its own names for heads, scales and windows. Instead of reading
names, the model is built on the meta device, where tensors have shapes and no content, and called with three tokens;
every layer states its demands in its call of the attention function. Demands that a paged cache of keys and values
cannot meet are refused by name, before a weight is read: linear attention and other state, latent attention, cross
attention, biases, attention in chunks, layers that differ in their heads. A layer that attends to the very keys and
values of an earlier one shares its pages.
"""

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface

from engine.weights.config import ScoreFunction, TransformersConfig, UnsupportedModel, read_json
from engine.weights.rope_config import longest_text
from engine.window import Window

_TRIAL_ATTENTION = "kvrelay_trial"
_NUM_TRIAL_TOKENS = 3
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Arguments of an attention call without effect here: the model is in eval mode, and keys include their positions.
_NEUTRAL_OPTIONS = frozenset({"dropout", "position_ids", "cache_position", "is_causal"})
_UNSUPPORTED_KEYS = {
    "quantization_config": "quantized weights",
    "transformers_weights": "weights in files of other names",
    "fusion_config": "fused modules",
}


def pretrained_config(model_dir: Path) -> Any:
    """Return transformers' own configuration for a folder's config.json; runs no code of a checkpoint.

    Raises UnsupportedModel unless the installed transformers knows the language model.
    """
    raw = read_json(model_dir / "config.json")
    for key, meaning in _UNSUPPORTED_KEYS.items():
        if raw.get(key):
            raise UnsupportedModel(f"config.json: {key}: {meaning} are not supported")
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"model_type {model_type!r} is unknown to transformers {transformers.__version__}")
    with refusing(f"config.json does not describe a {model_type!r}"):
        config = CONFIG_MAPPING[model_type].from_pretrained(model_dir, local_files_only=True)
    model_class = causal_lm_class(config)
    architectures = raw.get("architectures") or []
    if model_class.__name__ not in architectures:
        named = ", ".join(architectures) or "none named"
        raise UnsupportedModel(f"architecture {named} is not supported; of {model_type!r} {model_class.__name__} is")
    return config


def causal_lm_class(config: Any) -> Any:
    """Return the model class with a language model head. Raises UnsupportedModel when none exists."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"model_type {config.model_type!r} has no causal language model in transformers")
    with refusing(f"model_type {config.model_type!r} cannot be imported"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def read_transformers_config(model_dir: Path, *, dtype: torch.dtype) -> TransformersConfig:
    """Return the result of a trial run of a checkpoint's architecture. Takes up to a second; reads no weights.

    Raises UnsupportedModel, naming what the paged cache cannot express.
    """
    config = pretrained_config(model_dir)
    with refusing(f"{config.model_type!r} is not described as a decoder"):
        _refuse_by_config(config)
        num_layers, vocab_size = config.num_hidden_layers, config.vocab_size
    layers = _one_call_per_layer(_trial_run(config, dtype), num_layers)
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in layers}
    if len(shapes) > 1:
        raise UnsupportedModel(f"layers differ in (heads, key heads, head_dim): {sorted(shapes)}")
    windows = tuple(call.window for call in layers)
    _check_windows(config, windows)
    essentials = (transformers.__version__, json.dumps(read_json(model_dir / "config.json"), sort_keys=True))
    return TransformersConfig(
        architecture=causal_lm_class(config).__name__,
        vocab_size=vocab_size,
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        max_position_embeddings=_max_positions(config),
        windows=tuple(None if window is None else Window(num_tokens=window) for window in windows),
        scores=tuple(call.score for call in layers),
        kv_layers=_kv_layers(layers),
        source=hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest(),
    )


def pin_rotary_frequencies(model: nn.Module) -> None:
    """Keep a model's initial frequencies; mutates its rotary modules.

    "dynamic" and "longrope" would change them with the longest sequence of a batch, for all its sequences: cached and
    new keys would then have different frequencies. Below `max_position_embeddings` they are constant anyway.
    """
    rotary: Any
    for rotary in model.modules():
        rope_type = getattr(rotary, "rope_type", None)
        if isinstance(rope_type, str):
            rotary.rope_type = "default"
        elif isinstance(rope_type, dict):
            rotary.rope_type = dict.fromkeys(rope_type, "default")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception into UnsupportedModel: unfit models make transformers raise all kinds."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModel(f"{what}: {type(error).__name__}: {reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One layer's call of the attention function."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    score: ScoreFunction
    kv: tuple[Tensor, Tensor]
    """Keys and values; the same objects where layers share them."""


@dataclass(slots=True)
class _Trial:
    """Argument of the model's call that reaches the attention function and collects its calls."""

    dtype: torch.dtype
    calls: list[_Call] = field(default_factory=list)


def _refuse_by_config(config: Any) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type!r} has an encoder; only decoders are supported")
    if config.sub_configs:
        raise UnsupportedModel(f"{config.model_type!r} takes more than text; only language models are supported")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")


def _trial_run(config: Any, dtype: torch.dtype) -> list[_Call]:
    """Build the model without weights, call it once, and return its attention calls in order."""
    AttentionInterface.register(_TRIAL_ATTENTION, _record)
    trial = _Trial(dtype)
    config._attn_implementation = _TRIAL_ATTENTION  # noqa: SLF001 - from_config takes no such argument
    config._experts_implementation = "batched_mm"  # noqa: SLF001 - the only one whose shapes do not depend on routing
    with refusing(f"{config.model_type!r} cannot be tried without weights"), torch.inference_mode():
        with torch.device("meta"):
            model = causal_lm_class(config)._from_config(config, dtype=dtype).eval()  # noqa: SLF001
            tokens = torch.zeros((1, _NUM_TRIAL_TOKENS), dtype=torch.int64)
        pin_rotary_frequencies(model)
        model(input_ids=tokens, position_ids=tokens, use_cache=False, kvrelay_step=trial)
    return trial.calls


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kvrelay_step: _Trial | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record a layer's demands, or refuse them; an attention function of transformers."""
    name = type(module).__name__
    if kvrelay_step is None:
        raise UnsupportedModel(f"{name} is not handed the arguments that its model is called with")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} makes its own attention mask")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise UnsupportedModel(f"{name} is not causal")
    window, scale, softcap = (options.pop(key, None) for key in ("sliding_window", "scaling", "softcap"))
    extra = sorted(k for k, v in options.items() if k not in _NEUTRAL_OPTIONS and v is not None and v is not False)
    if extra:
        raise UnsupportedModel(f"{name} asks attention for {', '.join(extra)}")
    if query.dtype is not kvrelay_step.dtype or key.dtype is not query.dtype or value.dtype is not query.dtype:
        raise UnsupportedModel(f"{name} attends in {query.dtype}, {key.dtype}, {value.dtype}")
    _check_shapes(name, query, key, value)
    kvrelay_step.calls.append(
        _Call(
            layer_idx=int(getattr(module, "layer_idx", -1)),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            window=window,
            score=ScoreFunction(scale=scale, softcap=softcap),
            kv=(key, value),
        )
    )
    return query.transpose(1, 2), None


def _check_shapes(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[0] != 1 or {x.shape[2] for x in (query, key, value)} != {_NUM_TRIAL_TOKENS}:
        raise UnsupportedModel(f"{name} attends to something else than the tokens it is given")
    if query.shape[3] != key.shape[3] or key.shape != value.shape:
        raise UnsupportedModel(
            f"{name} has keys of {key.shape[1]} x {key.shape[3]} and values of {value.shape[1]} x {value.shape[3]};"
            " latent attention and other unequal heads are not supported"
        )
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModel(f"{name}: {query.shape[1]} query heads do not divide among {key.shape[1]} key heads")


def _one_call_per_layer(calls: list[_Call], num_layers: int) -> list[_Call]:
    if [call.layer_idx for call in calls] != list(range(num_layers)):
        raise UnsupportedModel(
            f"{len({call.layer_idx for call in calls})} of {num_layers} layers attend through transformers' attention"
            f" registry, {len(calls)} times in all; each has to, once"
        )
    return calls


def _kv_layers(layers: list[_Call]) -> tuple[int, ...]:
    """Return the layer of the pages that each layer has: those with the same keys and values have one."""
    owners: list[_Call] = []
    found: list[int] = []
    for call in layers:
        owner = next((i for i, each in enumerate(owners) if all(map(operator.is_, each.kv, call.kv))), len(owners))
        if owner == len(owners):
            owners.append(call)
        elif owners[owner].window != call.window:
            raise UnsupportedModel(
                f"layer {call.layer_idx} has a window of {call.window} over keys and values of layer"
                f" {owners[owner].layer_idx}, whose window is {owners[owner].window}"
            )
        found.append(owner)
    return tuple(found)


def _check_windows(config: Any, windows: tuple[int | None, ...]) -> None:
    """Refuse a model that would apply its windows only in masks."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if set(windows) - {None, window}:
        raise UnsupportedModel(f"sliding_window is {window}, the layers ask attention for windows {windows}")
    if layer_types:
        declared = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
        if declared != windows:
            raise UnsupportedModel(f"layer_types mean windows {declared}, the layers ask for {windows}")
    elif window and getattr(config, "use_sliding_window", True) and set(windows) == {None}:
        raise UnsupportedModel(f"sliding_window: no layer asks attention for a window of {window}")


def _max_positions(config: Any) -> int:
    """Return the length of a text at which rotary frequencies change, or the positions end."""
    trained = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    limit = longest_text({"max_position_embeddings": trained, "rope_parameters": parameters})
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind in ("longrope", "dynamic"):
            limit = min(trained, rope.get("original_max_position_embeddings", trained))
    return limit
