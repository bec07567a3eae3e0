"""Draft layers of EAGLE and MTP: what they read from checkpoints, and what they compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.eagle_checkpoint import DraftedModel, read_eagle, read_mtp
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import UnsupportedModel
from tests.engine.draft_layers import (
    CONFIG,
    EAGLE,
    EAGLE3,
    MIMO,
    MTP,
    MTP_LAYER,
    layer_tensors,
    reference_outputs,
    write_layer,
)

THIRD = CONFIG | {"draft_vocab_size": 50}
NUM_LAYERS, MODEL_HIDDEN, VOCAB = 6, 32, CONFIG["vocab_size"]


def a_model(hidden_size: int = MODEL_HIDDEN) -> DraftedModel:
    embedding = torch.randn(VOCAB, hidden_size, generator=torch.Generator().manual_seed(9))
    return DraftedModel(num_layers=NUM_LAYERS, embedding=embedding, logits=lambda hidden: hidden @ embedding.T)


def third_tensors() -> dict[str, Tensor]:
    tensors = layer_tensors(EAGLE3, THIRD, model_hidden=MODEL_HIDDEN)
    tensors["embed_tokens.weight"] = torch.randn(
        VOCAB, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(3)
    )
    return tensors


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3, MTP])
@torch.inference_mode()
def test_layer_computes_what_plain_torch_does_from_a_file_in_its_published_layout(tmp_path: Path, kind: str) -> None:
    model = a_model() if kind == EAGLE3 else a_model(CONFIG["hidden_size"])
    config = {EAGLE: CONFIG, EAGLE3: THIRD, MTP: CONFIG | MIMO}[kind]
    tensors = third_tensors() if kind == EAGLE3 else layer_tensors(kind, model_hidden=CONFIG["hidden_size"])
    read = read_mtp if kind == MTP else read_eagle
    layer = read(write_layer(tmp_path, tensors, config), model)
    assert layer.tapped_layers == {EAGLE: (), EAGLE3: (2, 3, 3), MTP: (NUM_LAYERS,)}[kind]
    store = TorchKvStore(
        kv_shape(layer.config, block_size=4, dtype=torch.float32, fingerprint=""), 8, device=torch.device("cpu")
    )
    ops, draw = TorchOps(layer.config, store), torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (9,), generator=draw)
    states = torch.randn(6, _state_size(kind), generator=draw)
    outputs = torch.zeros(0, CONFIG["hidden_size"])
    # A chunk with states of the model, then token by token with the layer's own outputs.
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
        span = SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=[5, 2, 7])
        step = ops.plan(AttentionMetadata.from_spans([span], block_size=4))
        given = states.clone() if begin == 0 else outputs[-1:].clone()
        found = layer.forward(ids[begin:end], given, step)
        outputs = torch.cat((outputs, found[-1:]))
    embedding = tensors.get("embed_tokens.weight", model.embedding)
    expected = reference_outputs(tensors, config, F.embedding(ids, embedding), states, outputs[:-1])
    torch.testing.assert_close(outputs, expected[5:], rtol=1e-4, atol=1e-5)
    logits = layer.logits(outputs, step)
    if kind == EAGLE:
        assert torch.equal(logits, model.logits(outputs))
        return
    final_norm = tensors["norm.weight" if kind == EAGLE3 else f"{MTP_LAYER}final_layernorm.weight"]
    normed = F.rms_norm(outputs, outputs.shape[-1:], final_norm, config["rms_norm_eps"])
    if kind == MTP:
        torch.testing.assert_close(logits, model.logits(normed), rtol=1e-4, atol=1e-5)
        return
    drafted = torch.arange(50) + tensors["d2t"]
    torch.testing.assert_close(logits[:, drafted], normed @ tensors["lm_head.weight"].T, rtol=1e-4, atol=1e-5)
    assert set(logits.isfinite()[0].nonzero().flatten().tolist()) == set(drafted.tolist())


def _state_size(kind: str) -> int:
    return 3 * MODEL_HIDDEN if kind == EAGLE3 else CONFIG["hidden_size"]


def test_names_and_files_of_other_converters_are_read_alike(tmp_path: Path) -> None:
    tensors = third_tensors()
    renamed = {"model." + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    first = read_eagle(write_layer(tmp_path / "first", tensors, THIRD), a_model())
    other = read_eagle(write_layer(tmp_path / "other", renamed, THIRD), a_model())
    pickled = write_layer(tmp_path / "pickled", tensors, THIRD)
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    for layer in (other, read_eagle(pickled, a_model())):
        for name in ("fc", "qkv", "gate_up", "head"):
            assert torch.equal(*(getattr(each.weights, name).weight for each in (first, layer)))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"fc.weight": None}, {}, r"fc\.weight is missing; the model needs 96 columns"),
        ({"norm.weight": torch.ones(7)}, {}, r"norm\.weight has shape \[7\]; the model needs \[64\]"),
        (
            {"mtp.fc.weight": torch.ones(2, 2)},
            {},
            r"mtp\.fc\.weight has no place in a layer of EAGLE or EAGLE-3, nor",
        ),
        ({"d2t": None}, {}, "d2t is missing"),
        ({"d2t": torch.full((50,), 100)}, {}, "d2t names tokens outside of the model's 131"),
        ({"embed_tokens.weight": None}, {}, r"embed_tokens\.weight is missing; the model's has another size"),
        ({}, {"vocab_size": 132}, "it is for 132 tokens, and this model has 131"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers: 2 of a draft layer"),
        ({}, {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (
            {},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
            r"before layers \[1, 2, 6\].* of the 6",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_what_does_not(
    tmp_path: Path, change: dict[str, Tensor | None], config: dict[str, Any], message: str
) -> None:
    tensors = {name: tensor for name, tensor in {**third_tensors(), **change}.items() if tensor is not None}
    with pytest.raises(UnsupportedModel, match=message):
        read_eagle(write_layer(tmp_path, tensors, THIRD | config), a_model())


class _Unpickled:
    """Anything but a tensor."""


def test_files_that_hold_no_tensors_are_refused_and_run_no_code(tmp_path: Path) -> None:
    (folder := write_layer(tmp_path, {}, THIRD)).joinpath("model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        read_eagle(folder, a_model())
    torch.save({"fc.weight": _Unpickled()}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="cannot read the draft layer"):
        read_eagle(folder, a_model())
