"""The interface of formats of quantized weights in safetensors files, and their errors."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight


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


def supported(config: Mapping[str, Any], key: str, choices: Collection[Any], *, where: str = "") -> Any:
    """Return config[key]. Raises UnsupportedModel unless it is one of the choices; `where` leads to a nested object."""
    value = config.get(key)
    if value not in choices:
        *others, last = map(str, choices)
        listed = f"are {', '.join(others)} and {last}" if others else f"is {last}"
        raise UnsupportedModel(f"quantization_config.{where}{key}: {value!r} is not supported; supported {listed}")
    return value
