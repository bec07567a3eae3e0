"""MiMo: a Qwen2 whose checkpoint has an MTP layer, which drafts for it, or is left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.config import ServingConfig
from engine.model.eagle_checkpoint import DraftedModel, mtp_bytes, read_mtp
from engine.runner import KeptStates, ModelExecutor
from engine.speculation.eagle import EagleDrafter
from engine.weights.config import UnsupportedModel
from tests.engine.draft_layers import (
    CONFIG,
    MIMO,
    MTP,
    MTP_LAYER,
    layer_tensors,
    load_layer,
    load_tiny,
    tiny_requests,
    write_layer,
    write_mimo,
)
from tests.engine.drafting import eager
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.test_speculation_model import serve
from tests.engine.tiny_models import make_model, make_prompt, reference_tokens
from worker.factory import drafting_bytes, speculator_for

SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(name="qwen2", scope="module")
def _qwen2() -> Any:
    return make_model("qwen2", **SIZES)


@pytest.fixture(name="model_dir", scope="module")
def _model_dir(qwen2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mimo(tmp_path_factory.mktemp("mimo"), qwen2, layer_tensors(MTP, model_hidden=64))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_model_answers_as_transformers_qwen2_whatever_its_mtp_layer_holds(
    model_dir: Path, qwen2: Any, kernels: str
) -> None:
    executor = load(model_dir, kernels=kernels)
    prompts = [make_prompt(length, seed=length) for length in (5, 23)]
    answers = Driver(executor).generate([make_sequence(prompt) for prompt in prompts], num_tokens=12)
    assert answers == [reference_tokens(qwen2, p, 12, guess=a) for p, a in zip(prompts, answers, strict=True)]


@torch.inference_mode()
def test_layer_reads_the_residual_stream_that_the_last_norm_has_not_touched(model_dir: Path, qwen2: Any) -> None:
    executor = load_tiny(model_dir)
    assert isinstance(load_layer(model_dir, executor, kind="mtp"), EagleDrafter)
    assert executor.kept_states is not None
    executor.kept_states = KeptStates(num_tokens=23, layers=executor.kept_states.layers)
    prompt, streams = make_prompt(23), []
    hook = qwen2.model.norm.register_forward_pre_hook(lambda _module, inputs: streams.append(inputs[0][0]))
    qwen2(torch.tensor([prompt]))
    hook.remove()
    (result,) = Driver(executor).step([(make_sequence(prompt), 23)])
    assert result.states is not None
    np.testing.assert_allclose(result.states, streams[0].numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 64}, {"num_blocks": 9}, {"num_blocks": 64, "dtype": "bfloat16", "quantization": "int4"}],
    ids=["one batch", "preempted", "int4"],
)
def test_answers_of_a_layer_that_guesses_badly_are_those_without_it(model_dir: Path, options: dict[str, Any]) -> None:
    executor = load_tiny(model_dir, block_size=16, **options)
    plain, before = serve(executor, tiny_requests(), None)
    assert bool(before.load().num_preemptions) == (options["num_blocks"] < 10)
    speculated, core = serve(executor, tiny_requests(), eager(load_layer(model_dir, executor, kind="mtp")))
    assert speculated == plain
    assert core.load().num_accepted_tokens < core.load().num_drafted_tokens


def test_worker_drafts_with_its_models_layer_and_leaves_it_room(model_dir: Path) -> None:
    speculation = {"method": "mtp", "kv_memory_gib": 2**-10}
    config = ServingConfig.model_validate({"model": {"id": str(model_dir), "speculation": speculation}})
    executor: ModelExecutor[Any] = load_tiny(model_dir, block_size=16)
    assert speculator_for(config, config.pools.decode, executor) is not None
    assert executor.kept_states is not None
    assert speculator_for(config, config.pools.prefill, executor) is None
    tensors = load_file(model_dir / "model.safetensors")
    num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(MTP_LAYER))
    assert drafting_bytes(config, config.pools.decode) == 2**20 + num_bytes > 2**20
    assert drafting_bytes(config, config.pools.prefill) == 0


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2, and only 1 is supported"),
        ({}, {"num_nextn_predict_layers": None}, "num_nextn_predict_layers: 0"),
        ({"input_proj.weight": None}, {}, r"input_proj\.weight is missing; the model needs 128 columns"),
        ({"final_layernorm.weight": torch.ones(7)}, {}, r"final_layernorm\.weight has shape \[7\]"),
        ({"experts.weight": torch.ones(7)}, {}, r"experts\.weight has no place"),
        (
            {"mlp.down_proj.weight": None, "mlp.down_proj.qweight": torch.ones(8, 8, dtype=torch.int32)},
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}},
            r"model\.mtp_layers\.0\.mlp\.down_proj is quantized",
        ),
    ],
)
def test_layers_that_are_missing_or_others_are_refused_by_what_they_are(
    tmp_path: Path, change: dict[str, Tensor | None], config: dict[str, Any], message: str
) -> None:
    changed = layer_tensors(MTP, model_hidden=64) | {MTP_LAYER + name: tensor for name, tensor in change.items()}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = write_layer(tmp_path, tensors, CONFIG | MIMO | config)
    embedding = torch.randn(CONFIG["vocab_size"], 64)
    with pytest.raises(UnsupportedModel, match=message):
        read_mtp(folder, DraftedModel(num_layers=1, embedding=embedding, logits=lambda hidden: hidden @ embedding.T))
    assert mtp_bytes(folder) > 0
