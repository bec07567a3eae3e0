"""Models with quantized weights and pages: what is converted, equal scales, and refusals with their reasons."""

import math
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.model.loader import kv_fingerprint, load_stacked_weights, load_weights, weight_files
from engine.pages.kv_format import check_kv_format, kv_format
from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config, read_json
from engine.weights.decoder_weights import HEAD_FIELD, DecoderWeights, GatedMlp, Linear, Projection, plain
from engine.weights.grouped import GroupedLinear
from engine.weights.layout import allocate_weights
from engine.weights.quantize import (
    FP8_MAX,
    Fp8Linear,
    Int8Linear,
    QuantizationMethod,
    check_quantization,
    kv_scales,
    quantize_weights,
    quantizer,
    round_to_fp8,
    widen_weights,
)
from tests.engine.driver import load_device

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def load(folder: Path) -> tuple[DecoderWeights, DecoderConfig]:
    config = parse_config(read_json(folder / "config.json"))
    return load_weights(weight_files(folder), config, dtype=torch.float32, device=CPU), config


def test_fp8_replaces_every_projection_but_the_head(checkpoint: Callable[[str], Path]) -> None:
    weights, config = load(checkpoint("qwen2"))
    head = weights.head
    quantize_weights(weights, config, "fp8")
    *layers, last = weights.projections()
    assert all(isinstance(projection, Fp8Linear) for projection in layers)
    assert last is head


@pytest.mark.parametrize(("method", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_replace_every_projection_with_the_head_in_8_bits(
    checkpoint: Callable[[str], Path], method: QuantizationMethod, bits: int
) -> None:
    weights, config = load(checkpoint("qwen2"))
    embedding = weights.embedding.clone()
    quantize_weights(weights, config, method)
    found = [p.weight.bits for p in weights.projections() if isinstance(p, GroupedLinear)]
    assert found == [bits] * 4 * len(weights.layers) + [8]
    assert torch.equal(weights.embedding, embedding), "tokens are looked up in what the checkpoint has"


def test_weights_widened_for_other_kernels_keep_their_values(checkpoint: Callable[[str], Path]) -> None:
    weights, config = load(checkpoint("qwen2"))
    quantize_weights(weights, config, "int4")
    x = torch.randn(3, weights.embedding.shape[1], generator=torch.Generator().manual_seed(0))
    before = [weights.layers[0].qkv(x), weights.head(x)]
    widen_weights(weights, lambda linear, _span: linear)
    assert all(isinstance(projection, Linear) for projection in weights.projections())
    assert torch.equal(weights.layers[0].qkv(x), before[0])
    assert torch.equal(weights.head(x), before[1])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama-one-key-head"])
def test_kv_scales_put_what_the_model_computes_inside_the_range(checkpoint: Callable[[str], Path], name: str) -> None:
    folder = checkpoint(name)
    weights, config = load(folder)
    scales = kv_scales(weights, config)
    assert len(scales) == config.num_layers
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    generator = torch.Generator().manual_seed(0)
    for layer, (key_scale, value_scale) in zip(weights.layers, scales, strict=True):
        assert math.frexp(key_scale)[0] == math.frexp(value_scale)[0] == 0.5, "powers of two"
        normed = F.rms_norm(torch.randn(500, config.hidden_size, generator=generator), (config.hidden_size,))
        qkv = layer.qkv(normed * layer.input_norm)
        key, value = qkv[:, q_size : q_size + kv_size], qkv[:, q_size + kv_size :]
        if layer.k_norm is not None:
            key = F.rms_norm(key.reshape(len(key), -1, config.head_dim), (config.head_dim,)) * layer.k_norm
        for computed, scale in ((key, key_scale), (value, value_scale)):
            largest = float(computed.abs().max()) / scale
            assert FP8_MAX / 32 < largest <= FP8_MAX, "neither saturated nor far below the range"
            rounded = round_to_fp8(computed, scale)
            assert float((rounded - computed).norm() / computed.norm()) < 0.03


def test_kv_scales_grow_with_the_weights_that_make_keys_and_values(checkpoint: Callable[[str], Path]) -> None:
    weights, config = load(checkpoint("llama"))
    before = kv_scales(weights, config)
    qkv = weights.layers[1].qkv
    assert isinstance(qkv, Linear)
    qkv.weight[-config.num_kv_heads * config.head_dim :] *= 8
    after = kv_scales(weights, config)
    assert after[1] == (before[1][0], before[1][1] * 8)
    assert after[0] == before[0]


def test_fingerprint_differs_by_quantization_and_by_kv_dtype(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    config, files = parse_config(read_json(folder / "config.json")), weight_files(folder)

    def fingerprint(**options: Any) -> str:
        return kv_fingerprint(config, files, dtype="bfloat16", block_size=16, **options)

    plain = fingerprint()
    assert plain == fingerprint(kv_dtype="bfloat16")
    others = [
        fingerprint(quantization="fp8"),
        fingerprint(quantization="int8"),
        fingerprint(kv_dtype="float8_e4m3fn"),
        fingerprint(kv_dtype="int8"),
        fingerprint(kv_dtype="int4"),
        fingerprint(kv_dtype="float8_e4m3fn", quantization="fp8"),
    ]
    assert len({plain, *others}) == 1 + len(others)


def checked(config: DecoderConfig, **changes: Any) -> None:
    options: dict[str, Any] = {"method": None, "kv_dtype": "auto", "block_size": 16, "device": CPU} | changes
    check_quantization(options["method"], config, device=options["device"])
    pages = kv_format(options["kv_dtype"], torch.bfloat16)
    check_kv_format(pages, config, block_size=options["block_size"], device=options["device"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "int3"}, "'int3' is not supported; supported are fp8, int8, int4"),
        ({"kv_dtype": "fp8"}, "cannot use kv_dtype: fp8 on a CPU.*choose int8, int4 or auto"),
        ({"kv_dtype": "int4"}, "int4 with heads of 24: it takes multiples of 32; choose int8"),
        ({"kv_dtype": "int8", "head_dim": 10}, "int8 with heads of 10: it takes multiples of 4; choose auto"),
        ({"kv_dtype": "int8", "block_size": 24}, "int8 with block_size: 24: it takes multiples of 16"),
    ],
)
def test_check_quantization_on_a_cpu_names_what_it_refuses(
    checkpoint: Callable[[str], Path], changes: dict[str, Any], reason: str
) -> None:
    config = replace(parse_config(read_json(checkpoint("llama") / "config.json")), head_dim=changes.get("head_dim", 24))
    with pytest.raises(UnsupportedModel, match=reason):
        checked(config, **{key: value for key, value in changes.items() if key != "head_dim"})
    config = replace(config, head_dim=32)
    for method in (None, "fp8", "int8", "int4"):
        checked(config, method=method)
    for kv_dtype in ("auto", "int8", "int4"):
        checked(config, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((8, 0), {"method": "fp8"}, "compute capability 9.0"),
        ((8, 0), {"kv_dtype": "fp8"}, "compute capability 9.0"),
        ((12, 0), {"method": "fp8"}, "compute capability 9.0 or 10.x; a card has 12.0"),
        ((9, 0), {"kv_dtype": "int8"}, "int8 on a GPU.*choose fp8 or auto"),
        ((9, 0), {"kv_dtype": "int4"}, "int4 on a GPU.*choose fp8 or auto"),
        ((9, 0), {"method": "fp8", "hidden_size": 40}, "multiples of 16"),
        ((9, 0), {"method": "int4"}, "int4 is computed by CPUs alone"),
    ],
)
def test_check_quantization_on_a_gpu_names_what_it_refuses(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")
    config = parse_config(read_json(checkpoint("llama") / "config.json"))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
    with pytest.raises(UnsupportedModel, match=reason):
        checked(replace(config, **(sizes | {k: v for k, v in changes.items() if k in sizes})), device=CUDA, **changes)
    checked(replace(config, **sizes), method="int8", device=CUDA)


def test_weights_that_are_no_numbers_are_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    # A code stands for NaN nowhere: it would be served as 0.
    weights, config = load(checkpoint("qwen2"))
    mlp = weights.layers[1].mlp
    assert isinstance(mlp, GatedMlp)
    plain(mlp.gate_up).weight[-1, 0] = float("inf")
    with pytest.raises(UnsupportedModel, match=r"cannot quantize model\.layers\.1\.mlp\.up_proj\.weight: it holds NaN"):
        quantize_weights(weights, config, "int8")


@pytest.mark.parametrize("read", [load_weights, load_stacked_weights])
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_weights_converted_while_they_load_equal_those_converted_afterwards(
    method: QuantizationMethod, read: Callable[..., DecoderWeights], checkpoint: Callable[[str], Path]
) -> None:
    expected, config = load(checkpoint("qwen2"))
    quantize_weights(expected, config, method)
    convert = quantizer(config, method, device=CPU)
    plain_weights: list[weakref.ref[Tensor]] = []

    def convert_and_watch(field: str, projection: Projection) -> Projection:
        assert [each() for each in plain_weights] == [None] * len(plain_weights), "two plain projections in memory"
        if field != HEAD_FIELD:
            plain_weights.append(weakref.ref(plain(projection).weight))
        return convert(field, projection)

    files = weight_files(checkpoint("qwen2"))
    found = read(files, config, dtype=torch.float32, device=CPU, convert=convert_and_watch)
    assert len(plain_weights) == 4 * config.num_layers
    for ours, theirs in zip(found.projections(), expected.projections(), strict=True):
        assert type(ours) is type(theirs)
        assert isinstance(ours, GroupedLinear | Fp8Linear) or method == "fp8"  # whose head is plain
        x = torch.randn(3, _in_features(ours), generator=torch.Generator().manual_seed(0))
        assert torch.equal(ours(x), theirs(x))


def _in_features(projection: Projection) -> int:
    assert isinstance(projection, Linear | GroupedLinear | Fp8Linear)
    return projection.weight.shape[1]


@pytest.mark.parametrize("method", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_device_executor_never_holds_all_weights_plain_and_scales_its_pages(
    method: Literal["fp8", "int8"], name: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, config = load(checkpoint(name))
    expected = kv_scales(loaded, config)
    allocated: list[DecoderWeights] = []

    def allocate(*args: Any, **options: Any) -> DecoderWeights:
        allocated.append(allocate_weights(*args, **options))
        sizes = [plain(each).weight.is_meta for each in allocated[0].projections()]
        assert all(sizes[:-1]), "plain weights of layers before they are read"
        return allocated[0]

    monkeypatch.setattr("engine.model.loader.allocate_weights", allocate)
    kind = Fp8Linear if method == "fp8" else Int8Linear
    # As on a GPU; a CPU's own kernels take integers in groups.
    quantize = quantizer(config, method, device=torch.device("meta"))
    monkeypatch.setattr("engine.cuda.loading.quantizer", lambda *_args, **_options: quantize)
    load_device(checkpoint(name), quantization=method)
    *layers, _head = allocated[0].projections()
    assert all(isinstance(each, kind) for each in layers)
    for ours, theirs in zip(kv_scales(allocated[0], config), expected, strict=True):
        # The largest channel may round over a power of two.
        assert all(a / b in (0.5, 1, 2) for a, b in zip(ours, theirs, strict=True))


def test_weights_converted_while_they_load_refuse_numbers_that_are_none(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    (file,) = weight_files(shutil.copytree(checkpoint("qwen2"), tmp_path / "damaged"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 3] = torch.nan
    save_file(tensors, file)
    config = parse_config(read_json(file.parent / "config.json"))
    with pytest.raises(UnsupportedModel, match=r"cannot quantize model\.layers\.1\.mlp\.up_proj\.weight: it holds NaN"):
        load_weights([file], config, dtype=torch.float32, device=CPU, convert=quantizer(config, "int8", device=CPU))
