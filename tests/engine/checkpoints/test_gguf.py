"""GGUF files: llama.cpp's blocks value by value, and whole models with the tokens of the plain ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.checkpoints.gguf_blocks import GROUPED_TYPES, unpack_blocks
from engine.model.loader import content_digest, weight_files
from engine.weights.config import UnsupportedModel
from engine.weights.decoder_weights import GatedMlp, Linear
from engine.weights.grouped import GroupedLinear
from tests.engine.checkpoints.gguf_models import save_gguf
from tests.engine.checkpoints.models import describe, load
from tests.engine.driver import Driver, make_sequence
from tests.engine.driver import load as load_executor
from tests.engine.tiny_models import make_prompt, reference_tokens

gguf = pytest.importorskip("gguf", reason="reading GGUF needs the `gguf` extra")


@pytest.mark.parametrize("type_name", sorted(GROUPED_TYPES))
def test_blocks_have_the_values_that_llama_cpp_gives_them(type_name: str) -> None:
    qtype = gguf.GGMLQuantizationType[type_name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(0)
    rows, num_blocks = 6, 1536 // block_size
    data = rng.integers(0, 256, (rows, num_blocks, block_bytes), dtype=np.uint8)
    num_scales = {"Q4_0": 1, "Q5_0": 1, "Q8_0": 1}.get(type_name, 2)
    numbers = rng.normal(0, 0.01, (rows, num_blocks, num_scales)).astype(np.float16)
    data[..., : 2 * num_scales] = numbers.view(np.uint8)
    data = data.reshape(rows, -1)
    weight = unpack_blocks(type_name, torch.from_numpy(data), (rows, 1536))
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(gguf.quants.dequantize(data, qtype)))
    assert weight.group_size == 32
    assert weight.bits == (4 if type_name.startswith("Q4") else 8)


MIXED = {"q_proj": "Q4_0", "k_proj": "Q8_0", "v_proj": "Q5_1", "o_proj": "Q4_1", "gate_proj": "Q5_0", "up_proj": "Q5_0"}


@pytest.mark.parametrize(
    ("types", "name", "architecture"),
    [
        (MIXED, "llama-attention-bias", "llama"),
        ({**MIXED, "down_proj": "Q4_0", "embed_tokens": "Q8_0"}, "llama-tied", "llama"),
        ({"down_proj": "BF16", "q_proj": "F16", "embed_tokens": "BF16", "lm_head": "Q8_0"}, "qwen2", "qwen2"),
        (dict.fromkeys(MIXED, "Q4_0"), "qwen3", "qwen3"),
    ],
    ids=["mixed", "tied", "halves", "qwen3"],
)
def test_gguf_generates_the_plain_models_tokens(
    tmp_path: Path, types: dict[str, str], name: str, architecture: str
) -> None:
    model = save_gguf(tmp_path, types, name=name, architecture=architecture)
    prompts = [make_prompt(num_tokens, seed=num_tokens) for num_tokens in (1, 7, 20)]
    answers = Driver(load_executor(tmp_path, kernels="torch")).generate(
        [make_sequence(prompt) for prompt in prompts], num_tokens=8
    )
    assert answers == [reference_tokens(model, p, 8, guess=a) for p, a in zip(prompts, answers, strict=True)]


def test_gguf_weights_keep_their_bits_and_mixed_ones_take_the_widest(tmp_path: Path) -> None:
    model = save_gguf(tmp_path, {**MIXED, "embed_tokens": "Q8_0"}, name="llama-tied")
    weights, _ = load(tmp_path)
    layer = weights.layers[0]
    assert isinstance(layer.qkv, GroupedLinear)
    assert isinstance(layer.output, GroupedLinear)
    assert isinstance(layer.mlp, GatedMlp)
    assert isinstance(layer.mlp.down, Linear), "stored in F32"
    assert (layer.qkv.weight.bits, layer.output.weight.bits) == (8, 4)
    assert isinstance(weights.head, GroupedLinear), "tied, and read in its own bits"
    assert torch.equal(weights.head.weight.dequantize(torch.float32), weights.embedding)
    attention = model.model.layers[0].self_attn
    expected = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert torch.allclose(layer.qkv.weight.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-6)


def test_gguf_type_of_other_groups_is_dequantized(tmp_path: Path) -> None:
    save_gguf(tmp_path, {"down_proj": "BF16"})
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    qtype = gguf.GGMLQuantizationType.Q6_K
    data = np.random.default_rng(0).integers(0, 60, (2, 210), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from engine.model.checkpoints.gguf_file import GgufCheckpoint

    checkpoint = GgufCheckpoint(tmp_path / "other.gguf")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (list(checkpoint.plain), list(checkpoint.quantized)) == ([name], [])
    assert torch.equal(checkpoint.tensor(name), torch.from_numpy(gguf.quants.dequantize(data, qtype)))


def test_safetensors_come_before_a_gguf_file_beside_them(tmp_path: Path) -> None:
    model = save_gguf(tmp_path, {})
    assert weight_files(tmp_path) == (tmp_path / "tiny.gguf",)
    model.save_pretrained(tmp_path)
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)


def test_several_gguf_files_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedModel, match=r"cannot choose between a\.gguf, b\.gguf"):
        weight_files(tmp_path)


def test_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    save_gguf(tmp_path, {}, architecture="gemma")
    with pytest.raises(UnsupportedModel, match=r"general\.architecture: 'gemma' is not supported; supported are llama"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\3\4" * 100])
def test_damaged_gguf_is_refused_by_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"cannot read .*tiny\.gguf"):
        content_digest(weight_files(tmp_path))


@pytest.mark.parametrize(
    ("key", "at", "content", "message"),
    [
        (b"llama.block_count", 4, b"\xff\xff\xff\x7f", r"num_hidden_layers: 2147483647 is not supported"),
        (b"llama.feed_forward_length", 4, b"\xff\xff\xff\x7f", r"intermediate_size: 2147483647 is not supported"),
        (b"general.architecture", 4, b"\xff" * 7 + b"\x7f", r"cannot read .*tiny\.gguf"),  # its length
        (b"general.architecture", 12, b"\xff", r"general\.architecture: its value in the GGUF file is damaged"),
    ],
)
def test_gguf_with_a_damaged_field_is_refused_at_once(
    tmp_path: Path, key: bytes, at: int, content: bytes, message: str
) -> None:
    save_gguf(tmp_path, {})
    (tmp_path / "config.json").unlink()
    damaged = bytearray((tmp_path / "tiny.gguf").read_bytes())
    begin = damaged.index(key) + len(key) + at  # behind the number of the value's type
    damaged[begin : begin + len(content)] = content
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    with pytest.raises(UnsupportedModel, match=message):
        describe(tmp_path)


def test_gguf_whose_queries_are_no_whole_heads_is_refused_by_name(tmp_path: Path) -> None:
    save_gguf(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 24}))
    with pytest.raises(UnsupportedModel, match=r"q_proj has 64 rows, no multiple of head_dim 24"):
        load(tmp_path)


def test_gguf_digest_differs_by_type_and_by_weights(tmp_path: Path) -> None:
    digests = set()
    for i, types in enumerate(({}, {"down_proj": "Q8_0"}, {"down_proj": "Q4_0"})):
        folder = tmp_path / str(i)
        folder.mkdir()
        save_gguf(folder, types)
        digests.add(content_digest(weight_files(folder)))
    file = tmp_path / "0" / "tiny.gguf"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    digests.add(content_digest([file]))
    assert len(digests) == 4


def test_quantization_of_a_gguf_file_is_refused_unless_it_is_plain(tmp_path: Path) -> None:
    save_gguf(tmp_path, {"down_proj": "F16"})
    assert describe(tmp_path, quantization="int8").weight_format is None
    save_gguf(tmp_path, {"down_proj": "Q4_0", "up_proj": "Q8_0"})
    with pytest.raises(UnsupportedModel, match=r"quantized already, by GGUF \(Q4_0, Q8_0\)"):
        describe(tmp_path, quantization="int8")


def test_gguf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_gguf(tmp_path, {})
    monkeypatch.setitem(__import__("sys").modules, "engine.model.checkpoints.gguf_header", None)
    with pytest.raises(UnsupportedModel, match=r"install the `gguf` extra"):
        load(tmp_path)


def test_gguf_alone_says_what_config_json_would(tmp_path: Path) -> None:
    model = save_gguf(tmp_path, {"down_proj": "Q8_0"}, name="qwen3", architecture="qwen3")
    expected = describe(tmp_path)
    (tmp_path / "config.json").unlink()
    found = describe(tmp_path)
    assert found.config == expected.config
    assert found.shape.fingerprint == expected.shape.fingerprint
    prompt = make_prompt(9)
    (answer,) = Driver(load_executor(tmp_path, kernels="torch")).generate([make_sequence(prompt)], num_tokens=5)
    assert answer == reference_tokens(model, prompt, 5, guess=answer)


def test_gguf_alone_whose_rotary_frequencies_are_stretched_asks_for_config_json(tmp_path: Path) -> None:
    save_gguf(tmp_path, {}, frequencies=True)
    describe(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight.*put the model's config\.json beside it"):
        describe(tmp_path)
