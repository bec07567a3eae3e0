"""The formats of quantized weights in safetensors files, chosen by config.json's `quantization_config`."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from engine.model.config import UnsupportedModel
from engine.model.grouped import GroupedWeight


class WeightFormat(Protocol):
    """How a checkpoint stores its quantized modules. Its repr belongs to the model's fingerprint."""

    @property
    def method(self) -> str:
        """Name of the format, as in `quantization_config.quant_method`."""
        ...

    @property
    def marker(self) -> str:
        """Tensor that every quantized module has, and no plain one."""
        ...

    @property
    def parts(self) -> Collection[str]:
        """Names of the tensors, within a quantized module, that take the place of its weight."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Ends of the names of tensors that nothing here needs."""
        ...

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """Return the weight [out_features, in_features] from a module's tensors, which are on the CPU.

        Values that do not lie on one grid per group of inputs come as a plain float32 tensor. Raises BadModule.
        """
        ...


class BadModule(Exception):
    """A module's tensors do not belong together; the message says why, and its reader names the module."""


def read_weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of the quantized weights that a config.json announces; None: all weights are plain.

    Raises UnsupportedModel, naming the key of `quantization_config` and its value.
    """
    # Imported here: each of these modules needs the protocol above.
    from engine.model.checkpoints import awq, compressed_tensors, gptq

    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise UnsupportedModel(f"config.json: quantization_config is {config!r}, not an object")
    readers: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
        "awq": awq.read_format,
        "compressed-tensors": compressed_tensors.read_format,
        "gptq": gptq.read_format,
    }
    method = supported(config, "quant_method", tuple(readers))
    try:
        return readers[method](config)
    except (AttributeError, TypeError) as error:  # a number stands where an object or a text belongs, say
        raise UnsupportedModel(f"config.json: quantization_config is malformed: {error}") from error


def supported(config: Mapping[str, Any], key: str, choices: Collection[Any], *, where: str = "") -> Any:
    """Return config[key]. Raises UnsupportedModel unless it is one of the choices; `where` leads to a nested object."""
    value = config.get(key)
    if value not in choices:
        *others, last = map(str, choices)
        listed = f"are {', '.join(others)} and {last}" if others else f"is {last}"
        raise UnsupportedModel(f"quantization_config.{where}{key}: {value!r} is not supported; supported {listed}")
    return value
