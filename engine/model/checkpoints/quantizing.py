"""Makes a compressed-tensors checkpoint of a plain one: the layers' projections rounded to few bits, the rest as it is.

Each projection is rounded by itself, to the nearest point of a grid whose scale is searched; no text is needed. One
tensor at a time is in memory, and what a file of the result holds.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.random_models import SEED_FILE
from engine.model.checkpoints.checkpoint import Checkpoint, open_checkpoint, quantized_by
from engine.model.checkpoints.formats import read_weight_format
from engine.model.checkpoints.packing import pack_words
from engine.model.config import DecoderConfig, parse_config, read_json
from engine.model.loader import weight_files
from engine.model.rounding import round_to_grid
from engine.model.weights import HEAD_MODULE, fused_projections, layer_modules

_INDEX_FILE = "model.safetensors.index.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_FILE_BYTES = 2 << 30


class QuantizeFailed(Exception):
    """A checkpoint cannot be quantized as asked; the message names the option and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The grid of the quantized weights."""

    bits: int
    """4 or 8."""
    group_size: int
    """Consecutive inputs that share a scale; -1: all."""

    def quantization_config(self) -> dict[str, Any]:
        """Return the object that describes it in config.json."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [HEAD_MODULE],
        }


def quantize_checkpoint(source: Path, target: Path, rounding: Rounding, report: Callable[[str], None]) -> None:
    """Write the checkpoint folder `target` from the folder `source`, whose weights are plain.

    The folder appears complete or not at all. `report` gets a line per layer. Raises QuantizeFailed or
    UnsupportedModel.
    """
    if target.exists():
        raise QuantizeFailed(f"cannot write {target}: it exists; name another folder or remove it")
    raw = read_json(source / "config.json")
    config, files = parse_config(raw), weight_files(source)
    if files[0].name == SEED_FILE:
        raise QuantizeFailed(f"cannot quantize {source}: its weights are random; set model.quantization instead")
    _check(config, rounding)
    if method := quantized_by(files, read_weight_format(raw)):
        raise QuantizeFailed(f"cannot quantize {source}: it is quantized already, by {method}; start from a plain one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)))
        checkpoint = stack.enter_context(open_checkpoint(files, config, None))
        folder = scratch / target.name
        folder.mkdir()
        for pattern in _COPIED:
            for file in source.glob(pattern):
                if file.name != _INDEX_FILE:
                    shutil.copy(file, folder)
        described = {**raw, "quantization_config": rounding.quantization_config()}
        (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
        writer = _Writer(folder)
        for name, tensor in _rounded(checkpoint, config, rounding, report):
            writer.add(name, tensor)
        writer.finish()
        folder.rename(target)


def _check(config: DecoderConfig, rounding: Rounding) -> None:
    """Raise QuantizeFailed unless the groups fill every row: other readers take no incomplete ones."""
    sizes = {projection.in_features for projection in fused_projections(config)}
    if rounding.group_size == -1 or all(size % rounding.group_size == 0 for size in sizes):
        return
    fitting = [str(size) for size in (32, 64, 128) if all(each % size == 0 for each in sizes)]
    listed = " and ".join(map(str, sorted(sizes)))
    raise QuantizeFailed(
        f"--group-size: {rounding.group_size} does not divide this model's {listed} inputs; choose"
        f" {', '.join([*fitting, '-1'])}"
    )


def _rounded(
    checkpoint: Checkpoint, config: DecoderConfig, rounding: Rounding, report: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the new checkpoint: plain ones first, then layer by layer."""
    layers = [
        [module for projection in fused_projections(config) for module in layer_modules(layer_idx, projection)]
        for layer_idx in range(config.num_layers)
    ]
    weights = {f"{module}.weight" for modules in layers for module in modules}
    for name in checkpoint.plain:
        if name not in weights:
            yield name, checkpoint.tensor(name)
    for layer_idx, modules in enumerate(layers):
        for module in modules:
            packed = _packed(checkpoint.tensor(f"{module}.weight"), rounding)
            yield from ((f"{module}.{part}", tensor) for part, tensor in packed.items())
        report(f"layer {layer_idx + 1} of {config.num_layers}")


def _packed(weight: Tensor, rounding: Rounding) -> dict[str, Tensor]:
    group_size = weight.shape[1] if rounding.group_size == -1 else rounding.group_size
    grouped = round_to_grid(weight, bits=rounding.bits, group_size=group_size)
    return {
        "weight_packed": pack_words(grouped.codes, rounding.bits),
        "weight_scale": grouped.scales.half(),  # exact: they were rounded before the codes were chosen
        "weight_shape": torch.tensor(weight.shape),
    }


@dataclass(slots=True)
class _Writer:
    """Gathers tensors into safetensors files of a bounded size."""

    folder: Path
    _pending: dict[str, Tensor] = field(default_factory=dict)
    _weight_map: dict[str, str] = field(default_factory=dict)
    _total_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; writes a file when enough have gathered."""
        self._pending[name] = tensor.contiguous()
        self._total_bytes += tensor.nbytes
        if sum(each.nbytes for each in self._pending.values()) >= _FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the last file and the index."""
        self._flush()
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
        (self.folder / _INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        if self._pending:
            name = f"model-{len(set(self._weight_map.values())) + 1:05}.safetensors"
            save_file(self._pending, self.folder / name, metadata={"format": "pt"})
            self._weight_map.update(dict.fromkeys(self._pending, name))
            self._pending = {}
