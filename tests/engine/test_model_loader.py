"""Reading of checkpoints, and their fingerprints."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.loader import content_digest, kv_fingerprint, load_weights, weight_files
from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config, read_json
from engine.weights.decoder_weights import DecoderWeights, plain
from engine.weights.layout import checkpoint_views
from tests.engine.tiny_models import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def single(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3-attention-bias")


def read_config(model_dir: Path) -> DecoderConfig:
    return parse_config(read_json(model_dir / "config.json"))


def read_weights(model_dir: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(weight_files(model_dir), read_config(model_dir), dtype=dtype, device=CPU)


def rewrite(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """Copy a checkpoint with some tensors replaced, added or (None) left out; dots of names are spelled __."""
    shutil.copy(source / "config.json", target / "config.json")
    tensors: dict[str, Any] = load_file(source / "model.safetensors")
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors")
    return target


def test_load_weights_when_sharded_equals_single_file(single: Path, tmp_path: Path) -> None:
    make_model("qwen3-attention-bias").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(weight_files(tmp_path)) > 2
    config = read_config(single)
    sharded, whole = (checkpoint_views(read_weights(folder), config) for folder in (tmp_path, single))
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_load_weights_when_embeddings_are_tied_shares_them(checkpoint: Callable[[str], Path]) -> None:
    weights = read_weights(checkpoint("llama-tied"))
    assert plain(weights.head).weight is weights.embedding


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__norm__weight": None}, r"1 tensors are missing in the checkpoint, model\.norm\.weight"),
        (
            {"model__layers__0__adapter__weight": torch.zeros(1)},
            r"model\.layers\.0\.adapter\.weight has no place",
        ),
        ({"model__norm__weight": torch.ones(61)}, r"shape \[61\], config\.json says \[60\]"),
        ({"model__norm__weight": torch.ones(60, dtype=torch.int8)}, r"stored as torch\.int8"),
    ],
)
def test_load_weights_when_a_tensor_does_not_fit_names_it(
    single: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    rewrite(single, tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        read_weights(tmp_path)


def test_load_weights_when_old_export_carries_frequencies_ignores_them(single: Path, tmp_path: Path) -> None:
    rewrite(single, tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert torch.equal(read_weights(tmp_path).embedding, read_weights(single).embedding)


def test_load_weights_ignores_the_draft_layers_that_config_json_names(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    rewrite(checkpoint("deepseek_v3"), tmp_path, model__layers__2__eh_proj__weight=torch.zeros(8))
    read_weights(tmp_path)
    rewrite(checkpoint("deepseek_v3"), tmp_path, model__layers__3__eh_proj__weight=torch.zeros(8))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.3\.eh_proj\.weight has no place"):
        read_weights(tmp_path)


def test_load_weights_when_file_is_cut_short_says_which(single: Path, tmp_path: Path) -> None:
    shutil.copy(single / "config.json", tmp_path)
    content = (single / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UnsupportedModel, match=r"cannot read .*model\.safetensors"):
        read_weights(tmp_path)


def test_weight_files_when_a_shard_is_missing_names_it(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(UnsupportedModel, match=r"model-00002-of-00002\.safetensors missing"):
        weight_files(tmp_path)


def test_weight_files_refuses_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="only safetensors"):
        weight_files(tmp_path)


def test_content_digest_when_files_are_copied_is_equal(single: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(single / "model.safetensors", tmp_path / "renamed.safetensors"))
    assert content_digest([copy]) == content_digest(weight_files(single))


def test_content_digest_when_any_one_tensor_is_retrained_differs(single: Path, tmp_path: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    digests = {content_digest(weight_files(single))}
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.k_norm.weight"):
        rewrite(single, tmp_path, **{name.replace(".", "__"): tensors[name] * 1.01})
        digests.add(content_digest(weight_files(tmp_path)))
    assert len(digests) == 4


def test_content_digest_when_file_is_not_safetensors_refuses(tmp_path: Path) -> None:
    for content in (b"\xff" * 64, (8).to_bytes(8, "little") + b"no json!"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UnsupportedModel, match="not a safetensors file"):
            content_digest([tmp_path / "model.safetensors"])


def test_kv_fingerprint_when_anything_differs_that_shapes_kv_differs(single: Path, tmp_path: Path) -> None:
    files, config = weight_files(single), read_config(single)
    raw = {**read_json(single / "config.json"), "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}
    fingerprints = [
        kv_fingerprint(config, files, dtype="float32", block_size=16),
        kv_fingerprint(config, files, dtype="bfloat16", block_size=16),
        kv_fingerprint(config, files, dtype="float32", block_size=32),
        kv_fingerprint(parse_config(raw), files, dtype="float32", block_size=16),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert kv_fingerprint(read_config(single), files, dtype="float32", block_size=16) == fingerprints[0]


def test_kv_fingerprint_survives_a_version_that_adds_a_field_with_a_default(single: Path) -> None:
    config, files = read_config(single), weight_files(single)
    later = dataclasses.make_dataclass(
        "LaterConfig", [("residual_factor", float, 1.0)], bases=(type(config),), frozen=True, slots=True, kw_only=True
    )
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

    same, other = later(**fields), later(**fields, residual_factor=0.5)

    now = kv_fingerprint(config, files, dtype="float32", block_size=16)
    assert kv_fingerprint(same, files, dtype="float32", block_size=16) == now
    assert kv_fingerprint(other, files, dtype="float32", block_size=16) != now
