"""Makes a compressed-tensors checkpoint of a plain one: the layers' projections rounded to few bits, the rest as it is.

Without a text, each projection is rounded by itself, to the nearest point of a grid whose scale is searched: one tensor
at a time is in memory, and what a file of the result holds. With one, each is rounded for what the text makes of those
before it (`engine.model.calibration`), which takes the memory of the plain model and the text's hidden states.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.own_files import publish
from common.random_models import SEED_FILE
from common.text_files import load_tokenizer
from engine.model.calibration import round_for_windows
from engine.model.checkpoints.checkpoint import Checkpoint, open_checkpoint, quantized_by, read_config
from engine.model.checkpoints.packing import pack_words
from engine.model.checkpoints.quantization_config import read_weight_format
from engine.model.loader import load_weights, weight_files
from engine.weights.config import DecoderConfig, parse_config
from engine.weights.grouped import GroupedWeight, split
from engine.weights.layout import HEAD_MODULE, all_projections, layer_projections
from engine.weights.precision import resolve_dtype
from engine.weights.quantize import check_finite, refuse_unless_finite
from engine.weights.rounding import round_to_zero_points

_INDEX_FILE = "model.safetensors.index.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_FILE_BYTES = 2 << 30
_WINDOW_TOKENS = 512


class QuantizeFailed(Exception):
    """A checkpoint cannot be quantized as asked; the message names the option and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The grid of the quantized weights."""

    bits: int
    """4 or 8."""
    group_size: int
    """Consecutive inputs that share a scale; -1: all."""
    windows: Sequence[Sequence[int]] = ()
    """Tokens of the text to round for, in windows of equal lengths."""

    @property
    def is_symmetric(self) -> bool:
        """Whether zero is the middle code; 4 bits are too few to waste one."""
        return self.bits == 8

    def quantization_config(self) -> dict[str, Any]:
        """Return the object that describes it in config.json."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
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
    files = weight_files(source)
    raw = read_config(source, files)
    config = parse_config(raw)
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
        for name, tensor in _plain_tensors(checkpoint, config):
            writer.add(name, tensor)
        by_text = _rounded_for_text(files, config, rounding) if rounding.windows else None
        for name, tensor in _quantized_tensors(by_text or _rounded(checkpoint, config, rounding), config, report):
            writer.add(name, tensor)
        writer.finish()
        publish(folder, target)


def _check(config: DecoderConfig, rounding: Rounding) -> None:
    """Raise QuantizeFailed unless the groups fill every row: other readers take no incomplete ones."""
    if config.experts is not None:
        raise QuantizeFailed(
            "cannot quantize a mixture of experts into a checkpoint; set model.quantization, which rounds it at load"
        )
    if config.has_single_blocks:
        raise QuantizeFailed("cannot quantize layers that are a mixer or an MLP each; set model.quantization instead")
    if config.recurrent is not None and rounding.windows:
        raise QuantizeFailed("cannot round recurrent layers for a text; quantize without --calibration")
    sizes = {projection.in_features for projection in all_projections(config)}
    if rounding.group_size == -1 or all(size % rounding.group_size == 0 for size in sizes):
        return
    fitting = [str(size) for size in (32, 64, 128) if all(each % size == 0 for each in sizes)]
    listed = " and ".join(map(str, sorted(sizes)))
    raise QuantizeFailed(
        f"--group-size: {rounding.group_size} does not divide this model's {listed} inputs; choose"
        f" {', '.join([*fitting, '-1'])}"
    )


def _layers(config: DecoderConfig) -> list[list[str]]:
    """Return the quantized modules of each layer, in the order in which they are written."""
    return [
        [module for projection in layer_projections(config, layer_idx) for module in projection.modules]
        for layer_idx in range(config.num_layers)
    ]


def _plain_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    weights = {f"{module}.weight" for modules in _layers(config) for module in modules}
    for name in checkpoint.plain:
        if name not in weights:
            yield name, checkpoint.tensor(name)


def _rounded(checkpoint: Checkpoint, config: DecoderConfig, rounding: Rounding) -> Iterator[GroupedWeight]:
    """Yield every module's weight, rounded to the nearest."""
    for modules in _layers(config):
        for module in modules:
            weight = checkpoint.tensor(f"{module}.weight")
            refuse_unless_finite(f"{module}.weight", weight)
            group_size = weight.shape[1] if rounding.group_size == -1 else rounding.group_size
            yield round_to_zero_points(weight, bits=rounding.bits, group_size=group_size)


def _rounded_for_text(files: Sequence[Path], config: DecoderConfig, rounding: Rounding) -> Iterator[GroupedWeight]:
    """Yield every module's weight, rounded for the windows."""
    cpu = torch.device("cpu")
    weights = load_weights(files, config, dtype=resolve_dtype("auto", cpu, {}), device=cpu)
    check_finite(weights, config)
    fused = round_for_windows(weights, config, rounding.windows, bits=rounding.bits, group_size=rounding.group_size)
    for projection, weight in fused:
        yield from split(weight, projection.rows)


def _quantized_tensors(
    rounded: Iterator[GroupedWeight], config: DecoderConfig, report: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the modules, layer by layer."""
    for layer_idx, modules in enumerate(_layers(config)):
        for module in modules:
            yield from ((f"{module}.{part}", tensor) for part, tensor in _packed(next(rounded)).items())
        report(f"layer {layer_idx + 1} of {config.num_layers}")


def _packed(weight: GroupedWeight) -> dict[str, Tensor]:
    packed = {
        "weight_packed": pack_words(weight.codes, weight.bits),
        "weight_scale": weight.scales.half(),  # exact: they were rounded before the codes were chosen
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.bits == 4:
        middle = torch.full_like(weight.scales, 2 ** (weight.bits - 1))
        zeros = middle if weight.offsets is None else (-weight.offsets / weight.scales).round()
        packed["weight_zero_point"] = pack_words(zeros.t().to(torch.uint8), weight.bits).t()
    return packed


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
            file = self.folder / name
            file.touch()
            mode = file.stat().st_mode  # by the user's umask; safetensors makes files that only the owner reads
            save_file(self._pending, file, metadata={"format": "pt"})
            file.chmod(mode)
            self._weight_map.update(dict.fromkeys(self._pending, name))
            self._pending = {}


def read_windows(files: Sequence[Path], model_dir: Path, *, num_tokens: int) -> list[list[int]]:
    """Return windows of equal lengths, evenly spaced over the texts: `num_tokens` in all, or what is there.

    Raises QuantizeFailed when a file cannot be read or the texts are shorter than one window, ModelNotFound without a
    tokenizer.
    """
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise QuantizeFailed(f"--calibration: cannot read {file} as text: {error}") from error
    return cut_windows("\n\n".join(texts), model_dir, num_tokens=num_tokens)


def cut_windows(text: str, model_dir: Path, *, num_tokens: int) -> list[list[int]]:
    """Return windows of a text; see `read_windows`."""
    token_ids = load_tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    num_windows = min(max(1, num_tokens // _WINDOW_TOKENS), len(token_ids) // _WINDOW_TOKENS)
    if num_windows == 0:
        raise QuantizeFailed(
            f"--calibration: the text has {len(token_ids)} tokens; give at least {_WINDOW_TOKENS}, better thousands"
        )
    stride = len(token_ids) // num_windows
    return [token_ids[begin : begin + _WINDOW_TOKENS] for begin in range(0, num_windows * stride, stride)]
