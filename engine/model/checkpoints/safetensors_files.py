"""Safetensors files as one checkpoint, plain or quantized."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.checkpoints.formats import BadModule, WeightFormat
from engine.model.checkpoints.stacked_experts import StackOrder, split_experts
from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight

_LANGUAGE_MODEL = "language_model."
_SOURCE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class SafetensorsCheckpoint:
    """A `Checkpoint` in open files."""

    def __init__(self, files: dict[str, Any], weight_format: WeightFormat | None) -> None:
        """Take the open file of each tensor."""
        self._files = files
        self._format = weight_format
        modules, stored = set(), set()
        ignored: tuple[str, ...] = ()
        if weight_format is not None:
            suffix = f".{weight_format.marker}"
            modules = {name.removesuffix(suffix) for name in files if name.endswith(suffix)}
            stored = {f"{module}.{part}" for module in modules for part in weight_format.parts}
            ignored = weight_format.ignored
        self.quantized: Collection[str] = modules
        self.plain: Collection[str] = [name for name in files if name not in stored and not name.endswith(ignored)]

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        tensor = self._read(name)
        if tensor.dtype not in _SOURCE_DTYPES:
            raise UnsupportedModel(
                f"{name} is stored as {tensor.dtype}, and config.json has no quantization_config for it"
            )
        return tensor

    def weight(self, module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `Checkpoint`."""
        assert self._format is not None, f"{module} is plain"
        names = {part: f"{module}.{part}" for part in self._format.parts}
        parts = {part: self._read(name) for part, name in names.items() if name in self._files}
        try:
            return self._format.unpack(parts, shape)
        except KeyError as error:
            raise UnsupportedModel(f"{module}.{error.args[0]} is missing in the checkpoint") from error
        except BadModule as error:
            raise UnsupportedModel(f"cannot read {module}, quantized by {self._format.method}: {error}") from error
        except (IndexError, RuntimeError, TypeError) as error:  # torch's, of shapes and dtypes that no quantizer writes
            shapes = ", ".join(f"{part} {list(tensor.shape)} {tensor.dtype}" for part, tensor in parts.items())
            raise UnsupportedModel(
                f"cannot read {module}, quantized by {self._format.method}: {shapes} do not belong together"
            ) from error

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except KeyError:
            raise UnsupportedModel(f"{name} is missing in the checkpoint") from None
        return tensor


@contextmanager
def open_safetensors(
    paths: Sequence[Path], weight_format: WeightFormat | None, stack_order: StackOrder | None = None
) -> Iterator[SafetensorsCheckpoint]:
    """Open the files of a checkpoint, whose experts may be stacked.

    Raises UnsupportedModel when one is damaged, then or while it is read.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                files.update(dict.fromkeys(file.keys(), file))
            except SafetensorError as error:
                raise UnsupportedModel(f"cannot read {path}: {error}") from error
        files = _of_language_model(files)
        yield SafetensorsCheckpoint(files if stack_order is None else split_experts(files, stack_order), weight_format)


def _of_language_model(files: dict[str, Any]) -> dict[str, Any]:
    """Return the open file of each tensor of a multimodal checkpoint's language model, whose names there have a prefix.

    Other checkpoints have no such names: all their tensors belong to one.
    """
    names = [name for name in files if name.startswith(_LANGUAGE_MODEL)]
    return {name.removeprefix(_LANGUAGE_MODEL): _NamedTensor(files[name], name) for name in names} or files


@dataclass(frozen=True, slots=True)
class _NamedTensor:
    """A tensor of another name, in the place of an open file that has it."""

    file: Any
    name: str

    def get_tensor(self, _name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def get_slice(self, _name: str) -> Any:
        return self.file.get_slice(self.name)
