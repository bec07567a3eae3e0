"""`kvrelay quantize`: a checkpoint with the nearest weights on a grid, complete or not at all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cli.main import app
from common.random_models import ensure_random_checkpoint
from engine.model.calibration import round_for_windows
from engine.model.checkpoints import quantizing
from engine.model.checkpoints.quantizing import QuantizeFailed, Rounding, quantize_checkpoint
from engine.model.loader import weight_files
from engine.weights.config import UnsupportedModel
from engine.weights.decoder_weights import Linear, plain
from engine.weights.grouped import GroupedLinear
from engine.weights.precision import cpu_has_bfloat16
from engine.weights.rounding import round_to_zero_points
from tests.engine.checkpoints.models import SIZES, load
from tests.engine.checkpoints.packers import pack_rows
from tests.engine.driver import Driver, make_sequence
from tests.engine.driver import load as load_executor
from tests.engine.tiny_models import make_model, make_prompt


def ignore(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_model("llama-attention-bias", **SIZES).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").touch()
    return folder


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 32), (4, -1)])
def test_quantized_checkpoint_has_the_nearest_weights_of_its_grid(
    source: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    target = tmp_path / "deeper" / "quantized"
    lines: list[str] = []
    quantize_checkpoint(source, target, Rounding(bits=bits, group_size=group_size), lines.append)
    assert lines == [f"layer {i} of 3" for i in (1, 2, 3)]
    weights, _ = load(target)
    plain_weights, _ = load(source)
    for layer, original in zip(weights.layers, plain_weights.layers, strict=True):
        for place, original_place, in_features in zip(layer.places(), original.places(), (64, 64, 64, 96), strict=True):
            projection, linear = place.get(), plain(original_place.get())
            assert isinstance(projection, GroupedLinear)
            size = in_features if group_size == -1 else group_size
            expected = round_to_zero_points(linear.weight, bits=bits, group_size=size).dequantize(torch.float32)
            assert torch.equal(projection.weight.dequantize(torch.float32), expected)
            assert projection.weight.bits == bits
            assert (projection.weight.offsets is None) == (bits == 8), "kernels are faster on symmetric grids"
            error = (expected - linear.weight).norm() / linear.weight.norm()
            assert float(error) < (0.15 if bits == 4 else 0.01)
            if linear.bias is not None:
                assert projection.bias is not None
                assert torch.equal(projection.bias, linear.bias)
    assert isinstance(weights.head, Linear)
    assert torch.equal(weights.head.weight, plain(plain_weights.head).weight)
    assert torch.equal(weights.embedding, plain_weights.embedding)


def test_checkpoint_calibrated_on_a_text_has_the_weights_for_it(source: Path, tmp_path: Path) -> None:
    windows = [list(make_prompt(48, seed=seed)) for seed in range(3)]
    lines: list[str] = []
    rounding = Rounding(bits=4, group_size=32, windows=windows)
    quantize_checkpoint(source, tmp_path / "quantized", rounding, lines.append)
    assert lines == [f"layer {i} of 3" for i in (1, 2, 3)]
    weights, config = load(tmp_path / "quantized")
    plain_weights, _ = load(source)
    if cpu_has_bfloat16():  # what calibration computes in
        plain_weights, _ = load(source, torch.bfloat16)
    expected = [weight for _, weight in round_for_windows(plain_weights, config, windows, bits=4, group_size=32)]
    found = [each.weight for each in weights.projections() if isinstance(each, GroupedLinear)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.dequantize(torch.float32), other.dequantize(torch.float32))


def test_checkpoint_of_zero_points_is_what_its_library_reads(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "quantized", Rounding(bits=4, group_size=32), ignore)
    tensors = load_file(tmp_path / "quantized" / "model-00001.safetensors")
    module = "model.layers.0.mlp.down_proj"
    weight = round_to_zero_points(load_file(source / "model.safetensors")[f"{module}.weight"], bits=4, group_size=32)
    assert weight.offsets is not None
    zeros = (-weight.offsets / weight.scales).long()
    expected = pack_rows(zeros.t().tolist(), 4).t()
    assert torch.equal(tensors[f"{module}.weight_zero_point"], expected)
    assert torch.equal(tensors[f"{module}.weight_packed"], pack_rows(weight.codes.tolist(), 4))


def test_quantized_files_are_read_by_whom_the_umask_allows(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "quantized", Rounding(bits=4, group_size=32), ignore)
    (tmp_path / "other").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "quantized").glob("*.safetensors")}
    assert modes == {(tmp_path / "other").stat().st_mode}


@pytest.mark.parametrize("windows", [[], [list(range(48))]], ids=["nearest", "calibrated"])
def test_weight_that_is_no_number_is_refused_by_name(tmp_path: Path, windows: list[list[int]]) -> None:
    model = make_model("llama", **SIZES)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "plain")
    rounding = Rounding(bits=4, group_size=32, windows=windows)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight: it holds NaN or infinity"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", rounding, ignore)


def test_quantized_checkpoint_can_be_served_and_has_its_tokenizer(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    quantize_checkpoint(source, target, Rounding(bits=8, group_size=32), ignore)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert not (target / "pytorch_model.bin").exists(), "only what serving reads is copied"
    prompt = make_prompt(12, seed=3)
    answers = [
        Driver(load_executor(folder, kernels="torch")).generate([make_sequence(prompt)], num_tokens=4)
        for folder in (source, target)
    ]
    assert answers[0] == answers[1], "8 bits change no token of a tiny model"


def test_large_checkpoint_is_written_in_several_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "_FILE_BYTES", 50_000)
    quantize_checkpoint(source, tmp_path / "quantized", Rounding(bits=4, group_size=32), ignore)
    files = weight_files(tmp_path / "quantized")
    assert len(files) > 2
    names = [name for file in files for name in load_file(file)]
    assert len(names) == len(set(names))
    load(tmp_path / "quantized")


def test_quantize_that_fails_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantizing, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        quantize_checkpoint(source, tmp_path / "quantized", Rounding(bits=4, group_size=32), ignore)
    assert list(tmp_path.iterdir()) == []


def test_quantize_refuses_what_it_would_overwrite_or_cannot_round(
    source: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    rounding = Rounding(bits=4, group_size=32)
    with pytest.raises(QuantizeFailed, match="it exists; name another folder"):
        quantize_checkpoint(source, tmp_path, rounding, ignore)
    quantize_checkpoint(source, tmp_path / "once", rounding, ignore)
    with pytest.raises(QuantizeFailed, match="quantized already, by compressed-tensors; start from a plain one"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", rounding, ignore)
    with pytest.raises(QuantizeFailed, match=r"64 does not divide this model's 64 and 96 inputs; choose 32, -1"):
        quantize_checkpoint(source, tmp_path / "other", Rounding(bits=4, group_size=64), ignore)
    random = ensure_random_checkpoint("random:qwen3-0.6b", tmp_path / "models")
    with pytest.raises(QuantizeFailed, match="its weights are random"):
        quantize_checkpoint(random, tmp_path / "other", rounding, ignore)
    with pytest.raises(QuantizeFailed, match="cannot quantize a mixture of experts"):
        quantize_checkpoint(checkpoint("mixtral"), tmp_path / "other", rounding, ignore)
    with pytest.raises(QuantizeFailed, match="a mixer or an MLP each"):
        quantize_checkpoint(checkpoint("nemotron_h"), tmp_path / "other", rounding, ignore)
    with pytest.raises(UnsupportedModel, match="safetensors missing"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "other", rounding, ignore)


@pytest.fixture
def run() -> Callable[..., tuple[int, str]]:
    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
        return result.exit_code, result.output

    return invoke


def test_quantize_command_prints_the_new_folder(
    run: Callable[..., tuple[int, str]], source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "quantized"
    code, output = run(source, "--format", "compressed-tensors", "--bits", 4, "--group-size", 32, target)
    assert code == 0
    assert output.splitlines()[-1] == str(target)
    assert isinstance(load(target)[0].layers[0].qkv, GroupedLinear)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--group-size", 40), "40 is neither -1 nor a multiple of 32"),
        (("--bits", 3), "'3' is not one of"),
        (("--group-size", 64), "--group-size: 64 does not divide"),
    ],
)
def test_quantize_command_with_a_wrong_option_says_why(
    run: Callable[..., tuple[int, str]], source: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    code, output = run(source, tmp_path / "quantized", *arguments)
    assert code in (1, 2)
    assert message in " ".join(output.replace("│", " ").split())
