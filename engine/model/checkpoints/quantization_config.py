"""Chooses the format of a checkpoint's quantized weights by config.json's `quantization_config`."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.checkpoints import awq, compressed_tensors, gptq
from engine.model.checkpoints.formats import WeightFormat, supported
from engine.weights.config import UnsupportedModel


def read_weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of the quantized weights that a config.json announces; None: all weights are plain.

    Raises UnsupportedModel, naming the key of `quantization_config` and its value.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise UnsupportedModel(f"config.json: quantization_config is {config!r}, not an object")
    readers: dict[str, Callable[[Mapping[str, Any]], WeightFormat | None]] = {
        "awq": awq.read_format,
        "compressed-tensors": compressed_tensors.read_format,
        "gptq": gptq.read_format,
        "mxfp4": lambda _config: None,  # of stacked experts, which are widened while they are read
    }
    method = supported(config, "quant_method", tuple(readers))
    try:
        return readers[method](config)
    except (AttributeError, TypeError) as error:  # a number stands where an object or a text belongs, say
        raise UnsupportedModel(f"config.json: quantization_config is malformed: {error}") from error
