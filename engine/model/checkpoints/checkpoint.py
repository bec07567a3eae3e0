"""A checkpoint, whatever its files are."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from engine.model.checkpoints import gguf_file
from engine.model.checkpoints.formats import WeightFormat
from engine.model.checkpoints.gguf_config import read_gguf_config
from engine.model.checkpoints.safetensors_files import open_safetensors
from engine.model.checkpoints.single_blocks import SingleBlocks
from engine.model.checkpoints.stacked_experts import stack_order
from engine.model.checkpoints.turned_rows import PairedRows
from engine.weights.config import DecoderConfig, read_json
from engine.weights.grouped import GroupedWeight


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, read one at a time, on the CPU."""

    @property
    def plain(self) -> Collection[str]:
        """Names of the tensors that `tensor` returns, in the order of the file."""
        ...

    @property
    def quantized(self) -> Collection[str]:
        """Names of the modules whose weight is quantized, such as "model.layers.0.mlp.down_proj"."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of a floating-point dtype. Raises UnsupportedModel."""
        ...

    def weight(self, module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """Return a quantized module's weight; a plain float32 tensor where its grid is not a grouped one.

        `shape` is (out_features, in_features) as in config.json. Raises UnsupportedModel.
        """
        ...


@contextmanager
def open_checkpoint(
    files: Sequence[Path], config: DecoderConfig, weight_format: WeightFormat | None
) -> Iterator[Checkpoint]:
    """Open safetensors files, or one GGUF file. Raises UnsupportedModel."""
    if is_gguf(files):
        gguf = gguf_file.GgufCheckpoint(files[0])
        yield PairedRows(stored=gguf, head_dim=config.head_dim) if gguf.has_interleaved_pairs else gguf
        return
    with open_safetensors(files, weight_format, stack_order(config.experts)) as stored:
        if config.has_single_blocks:
            yield SingleBlocks(stored, config)
        else:
            yield PairedRows(stored=stored, head_dim=config.head_dim) if config.has_interleaved_pairs else stored


def read_config(model_dir: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Return the content of config.json; without one, what a GGUF file says. Raises UnsupportedModel."""
    path = model_dir / "config.json"
    return read_gguf_config(files[0]) if is_gguf(files) and not path.exists() else read_json(path)


def is_gguf(files: Sequence[Path]) -> bool:
    """Return whether the weights are in a GGUF file."""
    return files[0].suffix == gguf_file.SUFFIX


def quantized_by(files: Sequence[Path], weight_format: WeightFormat | None) -> str | None:
    """Return the name of the format of a checkpoint's quantized weights; None: all are plain."""
    if is_gguf(files):
        types = gguf_file.quantized_types(files[0])
        return f"GGUF ({', '.join(types)})" if types else None
    return weight_format.method if weight_format is not None else None
