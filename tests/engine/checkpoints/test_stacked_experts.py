"""Experts stored in one tensor per layer, plain and in MXFP4, have the values that a straightforward reading gives."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.loader import load_stacked_weights, load_weights
from engine.weights.config import UnsupportedModel
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.layout import checkpoint_views
from tests.engine.checkpoints.models import load
from tests.engine.driver import Driver, make_sequence
from tests.engine.driver import load as load_executor
from tests.engine.tiny_models import make_model, make_prompt

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SHARDS = 2


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [num_experts, inputs, outputs], value by value."""
    experts = []
    for expert_blocks, expert_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        rows = []
        for groups, exponents in zip(expert_blocks, expert_scales, strict=True):
            row = []
            for packed, exponent in zip(groups, exponents, strict=True):
                for nibble in (nibble for byte in packed for nibble in (byte % 16, byte // 16)):
                    sign = -1 if nibble >= 8 else 1
                    row.append(sign * _MAGNITUDES[nibble % 8] * 2.0 ** (exponent - 127))
            rows.append(row)
        experts.append(rows)
    return torch.tensor(experts).transpose(1, 2)


def save_folder(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint whose neighbouring tensors are in different files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    names = sorted(tensors)
    for shard in range(_SHARDS):
        save_file({name: tensors[name].contiguous() for name in names[shard::_SHARDS]}, folder / f"{shard}.safetensors")
    weight_map = {name: f"{i % _SHARDS}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves the same model, plain or in MXFP4 with some tensors replaced or (None) left out."""
    generator = torch.Generator().manual_seed(5)
    make_model("gpt_oss", hidden_size=64, intermediate_size=32).save_pretrained(tmp_path / "source")
    raw = json.loads((tmp_path / "source/config.json").read_text())
    plain: dict[str, Any] = load_file(tmp_path / "source/model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = packed.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = dequantized(blocks, scales)

    def save(is_packed: bool, **changes: Tensor | None) -> Path:
        changed = {**packed, **{f"model.layers.0.mlp.experts.{name}": value for name, value in changes.items()}}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        described = {**raw, "quantization_config": {"quant_method": "mxfp4"}}
        if is_packed:
            return save_folder(tmp_path / "packed", described, kept)
        return save_folder(tmp_path / "plain", raw, plain)

    return save


@pytest.mark.parametrize("read", [load_weights, load_stacked_weights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_weights_are_the_values_that_the_format_says(
    save: Save, dtype: torch.dtype, read: Callable[..., DecoderWeights]
) -> None:
    found, expected = (
        checkpoint_views(*load(save(is_packed=is_packed), dtype, read=reader))
        for is_packed, reader in ((True, read), (False, load_weights))
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_experts_are_rounded_at_load_to_other_bits(save: Save) -> None:
    """The widened model would take four times the memory of its checkpoint."""
    answers = []
    for is_packed in (True, False):
        executor = load_executor(save(is_packed=is_packed), quantization="int8")
        answers += Driver(executor).generate([make_sequence(make_prompt(20))], num_tokens=6)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"down_proj_scales": None}, r"experts\.down_proj_scales is missing"),
        (
            {"down_proj_scales": torch.zeros((4, 64, 2), dtype=torch.uint8)},
            r"down_proj_blocks: .* and scales \[64, 2\] torch.uint8 do not belong together",
        ),
        ({"gate_up_proj_bias": torch.zeros(4)}, r"gate_up_proj_bias has shape \[4\], which is not that of stacked"),
        ({"gate_up_proj_bias": torch.zeros(3, 64)}, r"experts\.3\.gate_proj\.bias among them"),
        ({"gate_up_proj_bias": torch.zeros(4, 62)}, r"has shape \[31\], config\.json says \[32\]"),
    ],
)
def test_stacks_that_do_not_fit_are_refused_by_name(save: Save, changes: dict[str, Tensor | None], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load(save(is_packed=True, **changes))
