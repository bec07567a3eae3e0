"""Whole checkpoints with quantized weights: the tokens of the plain model with the same values, and clear refusals."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cuda.loading import check_weights_fit
from engine.model.checkpoints.fusing import fuse
from engine.weights.config import DecoderConfig, UnsupportedModel
from engine.weights.decoder_weights import Linear
from engine.weights.grouped import GroupedLinear
from engine.weights.quantize import kv_scales
from tests.engine.checkpoints.models import SIZES, describe, load, projections, save_quantized
from tests.engine.checkpoints.packers import (
    compressed_config,
    make_grid,
    make_weight,
    pack_awq,
    pack_compressed,
    pack_gptq,
)
from tests.engine.driver import Driver, make_sequence
from tests.engine.driver import load as load_executor
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}


def fused_values(model: Any, layer_idx: int, modules: tuple[str, ...]) -> torch.Tensor:
    linears = projections(model)
    return torch.cat([linears[f"model.layers.{layer_idx}.{module}"].weight.detach() for module in modules])


@pytest.mark.parametrize(
    ("config", "pack", "grid"),
    [
        (GPTQ, pack_gptq, {}),
        ({**GPTQ, "bits": 8, "group_size": -1, "sym": True}, pack_gptq, {"bits": 8, "group_size": -1}),
        ({**GPTQ, "desc_act": True}, pack_gptq, {"act_order": True}),
        (AWQ, pack_awq, {}),
        (compressed_config(), lambda grid: pack_compressed(grid, symmetric=True), {"symmetric": True}),
        (
            compressed_config(bits=8, group_size=-1, symmetric=False),
            lambda grid: pack_compressed(grid, symmetric=False),
            {"bits": 8, "group_size": -1},
        ),
    ],
    ids=["gptq", "gptq-8-bits", "gptq-act-order", "awq", "compressed", "compressed-8-bits"],
)
def test_quantized_checkpoint_generates_the_plain_models_tokens(
    tmp_path: Path, config: dict[str, Any], pack: Any, grid: dict[str, Any]
) -> None:
    model = save_quantized(tmp_path, config, pack, **grid)
    weights, _ = load(tmp_path)
    kind = Linear if grid.get("act_order") else GroupedLinear
    assert all(isinstance(place.get(), kind) for layer in weights.layers for place in layer.places())
    prompts = [make_prompt(num_tokens, seed=num_tokens) for num_tokens in (1, 7, 20)]
    answers = Driver(load_executor(tmp_path, kernels="torch")).generate(
        [make_sequence(prompt) for prompt in prompts], num_tokens=8
    )
    assert answers == [reference_tokens(model, p, 8, guess=a) for p, a in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answer_of_a_quantized_checkpoint_resumes_token_for_token(tmp_path: Path, dtype: str) -> None:
    save_quantized(tmp_path, AWQ, pack_awq, sizes=SIZES | {"head_dim": 32})  # which the compiled kernels attend to
    executor = load_executor(tmp_path, dtype=dtype)
    if not executor.exact_resume:
        pytest.skip("there are no compiled kernels here: torch's answers go on up to near ties")
    prompts = [make_prompt(num_tokens, seed=num_tokens) for num_tokens in (5, 12, 33)]
    answers = Driver(executor).generate([make_sequence(prompt) for prompt in prompts], num_tokens=12)
    chunked = Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=12, chunk_size=3)
    assert chunked == answers
    for prompt, answer in zip(prompts, answers, strict=True):
        (rest,) = Driver(executor).generate([make_sequence((*prompt, *answer[:5]))], num_tokens=7)
        assert rest == answer[5:]


def test_quantized_weights_are_fused_in_order_and_keep_their_bits(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, GPTQ, pack_gptq)
    weights, _ = load(tmp_path, torch.bfloat16)
    qkv = weights.layers[2].qkv
    assert isinstance(qkv, GroupedLinear)
    assert (qkv.weight.bits, qkv.weight.codes.dtype) == (4, torch.uint8)
    expected = fused_values(model, 2, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    assert torch.equal(qkv.weight.dequantize(torch.bfloat16), expected.to(torch.bfloat16))
    assert qkv.bias is not None
    assert qkv.bias.dtype is torch.bfloat16


def test_quantized_experts_beside_a_plain_router_generate_the_plain_models_tokens(tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    make_model("mixtral", **SIZES).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for seed, name in enumerate(sorted(name for name in tensors if ".experts." in name)):
        out_features, in_features = packed.pop(name).shape
        grid = make_grid((out_features, in_features), seed=seed)
        tensors[name] = grid.values()
        module = name.removesuffix(".weight")
        packed |= {f"{module}.{part}": tensor.contiguous() for part, tensor in pack_awq(grid).items()}
    save_file(tensors, plain / "model.safetensors")
    quantized.mkdir()
    save_file(packed, quantized / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    ignored = {"modules_to_not_convert": ["self_attn", "gate"]}
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": {**AWQ, **ignored}}))
    answers = [
        Driver(load_executor(folder, kernels="torch")).generate([make_sequence(make_prompt(20))], num_tokens=8)
        for folder in (plain, quantized)
    ]
    assert answers[0] == answers[1]


def test_modules_that_were_not_converted_stay_plain_and_so_do_those_fused_with_them(tmp_path: Path) -> None:
    def is_plain(module: str) -> bool:
        return "layers.0" in module or module.endswith("k_proj")

    model = save_quantized(tmp_path, {**AWQ, "modules_to_not_convert": ["k_proj"]}, pack_awq, plain=is_plain)
    weights, _ = load(tmp_path)
    kinds = [[type(place.get()) for place in layer.places()] for layer in weights.layers]
    assert kinds == [[Linear] * 4, [Linear, *[GroupedLinear] * 3], [Linear, *[GroupedLinear] * 3]]
    qkv = weights.layers[1].qkv
    assert isinstance(qkv, Linear)
    assert torch.equal(qkv.weight, fused_values(model, 1, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")))


def test_quantized_head_is_read(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    shard = tmp_path / "a.safetensors"
    tensors = load_file(shard) | load_file(tmp_path / "b.safetensors")
    del tensors["lm_head.weight"]
    grid = make_grid((131, 64))
    tensors |= {f"lm_head.{part}": tensor for part, tensor in pack_gptq(grid).items()}
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    weights, _ = load(tmp_path)
    assert isinstance(weights.head, GroupedLinear)
    assert torch.equal(weights.head.weight.dequantize(torch.float32), grid.values())


def test_loading_quantized_weights_never_allocates_the_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq, name="llama-tied")
    allocated: list[int] = []
    empty = torch.empty

    def counting_empty(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if not tensor.is_meta:
            allocated.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", counting_empty)
    _weights, config = load(tmp_path)
    assert sum(allocated) == config.vocab_size * 64 + (2 * config.num_layers + 1) * 64, "embedding and norms"


def test_zero_biases_that_quantizers_add_are_ignored_and_others_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq, name="llama")
    shard = tmp_path / "a.safetensors"
    tensors = load_file(shard)
    bias = "model.layers.0.mlp.down_proj.bias"
    save_file({**tensors, bias: torch.zeros(64)}, shard)
    load(tmp_path)
    save_file({**tensors, bias: torch.ones(64)}, shard)
    with pytest.raises(UnsupportedModel, match=r"down_proj\.bias has no place"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.mlp.up_proj.scales": None}, r"model\.layers\.1\.mlp\.up_proj\.scales is missing"),
        ({"model.layers.1.mlp.up_proj.qweight": None}, r"up_proj\.(qzeros|scales|g_idx) has no place"),
        (
            {"model.layers.1.mlp.up_proj.qzeros": torch.zeros(1, 1, dtype=torch.int32)},
            r"cannot read model\.layers\.1\.mlp\.up_proj, quantized by gptq: qzeros has shape \[1, 1\]",
        ),
        (
            {"model.layers.1.mlp.up_proj.g_idx": torch.tensor(0)},
            r"cannot read model\.layers\.1\.mlp\.up_proj, quantized by gptq: .*g_idx has shape \[\]",
        ),
        ({"model.extra.qweight": torch.zeros(1, dtype=torch.int32)}, r"quantized model\.extra has no place"),
    ],
)
def test_quantized_module_that_is_damaged_is_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    tensors: dict[str, torch.Tensor | None] = {
        **load_file(tmp_path / "a.safetensors"),
        **load_file(tmp_path / "b.safetensors"),
        **changes,
    }
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path)


def test_quantization_of_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    with pytest.raises(UnsupportedModel, match=r"cannot apply quantization: int8: .* quantized already, by gptq"):
        describe(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("quantization", "is_awq", "free_gib", "reason"),
    [
        (None, True, 132, None),
        (
            None,
            True,
            131,
            r"are in awq, and a GPU takes them widened to bfloat16: 131\.4 GiB, and 131\.0 GiB",
        ),
        (None, False, 131, r"take 131\.4 GiB in bfloat16, and .*; set model\.quantization: fp8"),
        ("fp8", False, 70, None),
        ("fp8", False, 66, r"take 67\.7 GiB in fp8, and 66\.0 GiB of the device .*; use a smaller model"),
    ],
)
def test_weights_of_70_billion_parameters_are_refused_on_a_gpu_with_their_size(
    tmp_path: Path, quantization: Literal["fp8"] | None, free_gib: int, reason: str | None, *, is_awq: bool
) -> None:
    save_quantized(tmp_path, AWQ, pack_awq)
    small = describe(tmp_path, dtype="bfloat16")
    assert isinstance(small.config, DecoderConfig)
    sizes: dict[str, Any] = {"hidden_size": 8192, "num_layers": 80, "intermediate_size": 28672, "vocab_size": 128256}
    heads: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "has_tied_embeddings": False}
    model = replace(small, config=replace(small.config, **sizes, **heads))
    if not is_awq:
        model = replace(model, weight_format=None)
    with nullcontext() if reason is None else pytest.raises(UnsupportedModel, match=reason):
        check_weights_fit(model, quantization, free_gib << 30)


def test_fingerprint_differs_when_the_same_bytes_mean_other_weights(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    config = json.loads((tmp_path / "config.json").read_text())
    fingerprints = set()
    for layout in ("gptq", "gptq_v2"):
        config["quantization_config"]["checkpoint_format"] = layout
        (tmp_path / "config.json").write_text(json.dumps(config))
        fingerprints.add(describe(tmp_path).shape.fingerprint)
    assert len(fingerprints) == 2


def test_kv_scales_of_grouped_weights_are_those_of_the_plain_model(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    weights, config = load(tmp_path)
    found = kv_scales(weights, config)
    for layer in weights.layers:
        assert isinstance(layer.qkv, GroupedLinear)
        layer.qkv = Linear(weight=layer.qkv.weight.dequantize(torch.float32), bias=layer.qkv.bias)
    assert found == kv_scales(weights, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_different_grids_are_joined_without_rounding(dtype: torch.dtype) -> None:
    parts = [
        make_weight(4, 3, 128, 32, has_offsets=False),
        make_weight(8, 3, 128, 64, has_offsets=False),
        make_weight(4, 3, 128, 128, has_offsets=True),
    ]
    fused = fuse(parts, None, like=torch.empty(0, dtype=dtype))
    assert isinstance(fused, GroupedLinear)
    assert (fused.weight.bits, fused.weight.group_size) == (8, 32)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    # A symmetric part among others gets an offset, whose sum rounds once more than its product did.
    assert torch.allclose(fused.weight.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-5)
    same_kind = fuse(parts[:2], None, like=torch.empty(0, dtype=dtype))
    assert isinstance(same_kind, GroupedLinear)
    assert torch.equal(same_kind.weight.dequantize(torch.float32), expected[:6])


def test_fingerprint_when_a_device_does_not_round_inputs_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, GPTQ, pack_gptq)
    on_cpu = describe(tmp_path).shape.fingerprint
    monkeypatch.setattr("engine.options.resolve_device", torch.device)
    on_gpu = describe(tmp_path, device="cuda").shape.fingerprint
    assert on_cpu != on_gpu, "their KV must not be exchanged"
