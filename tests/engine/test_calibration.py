"""Rounding for a text: closer to the model's results on it than rounding to the nearest, on grids that kernels like."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.calibration import round_for_windows
from engine.model.decoder import Decoder
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import DecoderWeights, plain
from engine.weights.gptq import TextSums, round_for_text
from engine.weights.grouped import GroupedLinear
from engine.weights.rounding import round_to_zero_points
from tests.engine.checkpoints.models import SIZES, load
from tests.engine.tiny_models import make_model, make_prompt

ROWS, INPUTS = 24, 96


def correlated_inputs(num_tokens: int = 400) -> Tensor:
    """Inputs of which a few directions make up the most, as in a real model."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, 12, generator=generator) @ torch.randn(12, INPUTS, generator=generator)
    return hidden + 0.2 * torch.randn(num_tokens, INPUTS, generator=generator)


def some_weight() -> Tensor:
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.05


def sums_of(x: Tensor, y: Tensor) -> TextSums:
    sums = TextSums.zero((y.shape[1], x.shape[1]))
    for part in range(0, len(x), 100):
        sums.add(x[part : part + 100], y[part : part + 100])
    return sums


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("group_size", [32, 96])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_on_the_text_are_closer_than_those_of_the_nearest_weights(bits: int, group_size: int) -> None:
    x, weight = correlated_inputs(), some_weight()
    found = round_for_text(weight, sums_of(x, x @ weight.t()), bits=bits, group_size=group_size)
    nearest = round_to_zero_points(weight, bits=bits, group_size=group_size)
    wanted = x @ weight.t()
    errors = [error(x @ each.dequantize(torch.float32).t(), wanted) for each in (found, nearest)]
    assert errors[0] < 0.6 * errors[1]


def test_inputs_that_differ_from_the_models_own_are_made_up_for() -> None:
    x, weight = correlated_inputs(), some_weight()
    disturbed = x @ (torch.eye(INPUTS) + 0.1 * torch.randn(INPUTS, INPUTS, generator=torch.Generator().manual_seed(2)))
    wanted = x @ weight.t()
    found, blind = (
        round_for_text(weight, sums_of(disturbed, y), bits=4, group_size=32) for y in (wanted, disturbed @ weight.t())
    )
    errors = [error(disturbed @ each.dequantize(torch.float32).t(), wanted) for each in (found, blind)]
    assert errors[0] < 0.5 * errors[1]


def test_inputs_without_correlation_give_the_nearest_weights() -> None:
    weight = some_weight()
    found = round_for_text(weight, TextSums(torch.eye(INPUTS), weight.clone()), bits=4, group_size=32)
    nearest = round_to_zero_points(weight, bits=4, group_size=32)
    assert torch.allclose(found.dequantize(torch.float32), nearest.dequantize(torch.float32), atol=1e-6)


def test_input_that_the_text_never_has_keeps_its_weights() -> None:
    x, weight = correlated_inputs(), some_weight()
    x[:, 5] = 0
    found = round_for_text(weight, sums_of(x, x @ weight.t()), bits=8, group_size=32).dequantize(torch.float32)
    assert torch.allclose(found[:, 5], weight[:, 5], atol=2e-3)


def test_grid_of_a_text_has_scales_and_offsets_of_float16() -> None:
    # Kernels read wider ones too, but a fifth more bytes a token.
    weight = torch.cat([some_weight() * factor for factor in (1e-4, 1.0, 300.0)])
    x = correlated_inputs()
    for each in (
        round_for_text(weight, sums_of(x, x @ weight.t()), bits=4, group_size=32),
        round_to_zero_points(weight, bits=4, group_size=32),
    ):
        assert each.offsets is not None
        assert all(torch.equal(grid.half().float(), grid) for grid in (each.scales, each.offsets))


def test_constant_and_zero_weights_keep_their_values() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.5
    found = round_to_zero_points(weight, bits=4, group_size=32).dequantize(torch.float32)
    assert torch.allclose(found, weight, rtol=0.01)


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], tuple[DecoderWeights, DecoderConfig]]:
    def make(name: str) -> tuple[DecoderWeights, DecoderConfig]:
        make_model(name, **SIZES).save_pretrained(tmp_path)
        return load(tmp_path)

    return make


def hidden_states(weights: DecoderWeights, config: DecoderConfig, window: list[int]) -> Tensor:
    shape = kv_shape(config, block_size=16, dtype=torch.float32, kv_dtype="auto", fingerprint="test")
    ops = TorchOps(config, TorchKvStore(shape, 4, device=torch.device("cpu")))
    span = SequenceSpan(num_computed=0, num_new_tokens=len(window), block_table=range(4))
    return Decoder(config, weights).forward(
        torch.tensor(window), ops.plan(AttentionMetadata.from_spans([span], block_size=16))
    )


@pytest.mark.parametrize("name", ["gemma3-every-third", "llama-attention-bias", "qwen3"])
def test_model_rounded_for_windows_stays_closer_to_itself_than_the_nearest(
    model: Callable[[str], tuple[DecoderWeights, DecoderConfig]], name: str
) -> None:
    weights, config = model(name)
    windows = [list(make_prompt(64, seed=seed)) for seed in range(8)]
    expected = [hidden_states(weights, config, window) for window in windows]
    rounded = dict.fromkeys(("text", "nearest"), 0.0)
    by_text = [weight for _, weight in round_for_windows(weights, config, windows, bits=4, group_size=32)]
    assert all(torch.equal(a, hidden_states(weights, config, b)) for a, b in zip(expected, windows, strict=True)), (
        "the weights stay as they are"
    )
    for kind in rounded:
        copy, _ = model(name)
        for layer_idx, layer in enumerate(copy.layers):
            for place_idx, place in enumerate(layer.places()):
                linear = plain(place.get())
                nearest = round_to_zero_points(linear.weight, bits=4, group_size=32)
                weight = by_text[4 * layer_idx + place_idx] if kind == "text" else nearest
                place.put(GroupedLinear(weight, linear.bias))
        found = [hidden_states(copy, config, window) for window in windows]
        rounded[kind] = error(torch.cat(found), torch.cat(expected))
    assert rounded["text"] < 0.8 * rounded["nearest"]
