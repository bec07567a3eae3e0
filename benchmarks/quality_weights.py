"""Weights for `benchmarks.quality`: off their grid, and from a checkpoint in 4 bits that `kvrelay quantize` would make.

The text to calibrate with are docstrings of Python's standard library, long ones, file by file: prose and examples like
those of the text that is measured, and none of its sentences.
"""

import ast
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.checkpoints.quantization_config import read_weight_format
from engine.model.checkpoints.quantizing import Rounding, cut_windows, quantize_checkpoint
from engine.model.loader import load_weights, weight_files
from engine.weights.config import DecoderConfig, read_json
from engine.weights.decoder_weights import DecoderWeights, GatedMlp, Linear, plain
from engine.weights.layout import checkpoint_views

_MIN_CHARACTERS = 200
_GROUP_SIZE = 32
_SCALE_DEVIATION = 0.2


def leave_grid(weights: DecoderWeights, config: DecoderConfig) -> None:
    """Scale every input of the layers' projections at random, and what it is multiplied with in reverse.

    The model computes the same function, but for rounding, and its weights lie on no grid. Mutates `weights`.
    """
    generator = torch.Generator().manual_seed(0)

    def scales(count: int) -> Tensor:
        return torch.exp(_SCALE_DEVIATION * torch.randn(count, generator=generator))

    group, num_values = config.num_heads // config.num_kv_heads, config.num_kv_heads * config.head_dim
    for layer in weights.layers:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMlp), "the models here have no experts"
        for norm, projection in ((layer.input_norm, layer.qkv), (layer.post_attention_norm, mlp.gate_up)):
            scale = scales(config.hidden_size)
            norm.div_(scale)
            plain(projection).weight.mul_(scale)
        scale = scales(num_values)
        _scale_rows(plain(layer.qkv), slice(-num_values, None), scale)
        of_heads = scale.view(config.num_kv_heads, 1, -1).expand(-1, group, -1)
        plain(layer.output).weight.div_(of_heads.flatten())
        scale = scales(config.intermediate_size)
        _scale_rows(plain(mlp.gate_up), slice(config.intermediate_size, None), scale)
        plain(mlp.down).weight.div_(scale)


def _scale_rows(linear: Linear, rows: slice, scale: Tensor) -> None:
    linear.weight[rows].mul_(scale[:, None])
    if linear.bias is not None:
        linear.bias[rows].mul_(scale)


def quantized(
    weights: DecoderWeights, config: DecoderConfig, model_dir: Path, *, calibration_tokens: int
) -> DecoderWeights:
    """Return plain weights as they are read from a checkpoint in 4 bits; without calibration tokens the nearest ones.

    `model_dir` has the model's configuration and tokenizer.
    """
    windows = cut_windows(calibration_text(), model_dir, num_tokens=calibration_tokens) if calibration_tokens else []
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "plain"), Path(scratch, "quantized")
        source.mkdir()
        for path in model_dir.glob("*.json"):
            shutil.copy(path, source)
        (source / "model.safetensors.index.json").unlink(missing_ok=True)
        views = checkpoint_views(weights, config)
        save_file({name: view.clone() for name, view in views.items()}, source / "model.safetensors")
        quantize_checkpoint(source, target, Rounding(bits=4, group_size=_GROUP_SIZE, windows=windows), _ignore)
        return load_weights(
            weight_files(target),
            config,
            dtype=weights.embedding.dtype,
            device=weights.embedding.device,
            weight_format=read_weight_format(read_json(target / "config.json")),
        )


def calibration_text() -> str:
    """Return the docstrings."""
    return "\n\n".join(_docstrings(Path(sysconfig.get_path("stdlib"))))


def _docstrings(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > _MIN_CHARACTERS:
                    yield text


def _ignore(_line: str) -> None:
    pass
