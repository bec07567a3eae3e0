"""Architectures that transformers computes, on our pages, against transformers alone."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.ids import BlockId
from engine.events import Started
from engine.model import transformers_trial
from engine.model.transformers_decoder import TransformersDecoder, TransformersOps
from engine.model.transformers_loader import TESTED_ARCHITECTURES, load_transformers_decoder
from engine.model.transformers_trial import read_transformers_config
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import ScoreFunction, UnsupportedModel
from engine.window import Window
from tests.builders import BLOCK_SIZE, assert_empty, core_on, make_request, served
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.every_way import assert_answers_are_those_of_transformers
from tests.engine.tiny_models import MAX_MODEL_LEN, TRANSFORMERS_MODELS, make_model, make_prompt, reference_tokens

CPU = torch.device("cpu")
NUM_TOKENS = 6
# Around the block size, beyond the windows of 7; and the one-token prompt.
PROMPT_LENS = (1, 5, 23, 40)
PROMPT = make_prompt(45)


def load_decoder(model_dir: Path, dtype: torch.dtype = torch.float32) -> TransformersDecoder:
    config = read_transformers_config(model_dir, dtype=dtype)
    return load_transformers_decoder(model_dir, config, dtype=dtype, device=CPU)


def prompt_logits(decoder: TransformersDecoder, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return our logits [num_tokens, vocab_size] of PROMPT in one chunk."""
    shape = kv_shape(decoder.config, block_size=BLOCK_SIZE, dtype=dtype, fingerprint="test")
    store = TorchKvStore(shape, 12, device=CPU)
    table = [BlockId(i) for i in reversed(range(12))]
    span = SequenceSpan(num_computed=0, num_new_tokens=len(PROMPT), block_table=table)
    step = TransformersOps(decoder.config, store).plan(AttentionMetadata.from_spans([span], block_size=BLOCK_SIZE))
    with torch.inference_mode():
        return decoder.logits(decoder.forward(torch.tensor(PROMPT), step))


def write_config(model_dir: Path, model_type: str, **overrides: Any) -> None:
    """Write a small config.json without weights."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
    }
    config = transformers.AutoConfig.for_model(model_type, **{**shape, **overrides})
    config.architectures = overrides.get("architectures") or [_causal_lm_name(config.model_type)]
    config.save_pretrained(model_dir)


def _causal_lm_name(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def gemma2(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("gemma2")


@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
def test_generate_when_greedy_in_mixed_batches_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    executor = load(tmp_path)
    assert isinstance(executor.model, TransformersDecoder)
    torch.testing.assert_close(prompt_logits(executor.model), expected, atol=1e-4, rtol=1e-4)
    prompts = [make_prompt(num, seed=num) for num in PROMPT_LENS]
    driver = Driver(executor)
    answers = driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=7)
    found = zip(prompts, answers, strict=True)
    assert answers == [reference_tokens(reference, p, NUM_TOKENS, guess=answer) for p, answer in found]


def test_tested_architectures_are_those_that_are_tested_here() -> None:
    tested = {_causal_lm_name(model_type) for model_type, _ in TRANSFORMERS_MODELS.values()}
    assert tested == TESTED_ARCHITECTURES


@pytest.mark.parametrize("name", ["gemma2", "olmoe", "cohere", "phi3-longrope"])
def test_engine_when_prompt_is_cached_answers_as_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    reference = make_model(name)
    core = core_on(load(checkpoint(name)), max_step_tokens=16)
    prompt = make_prompt(5 * BLOCK_SIZE + 1)
    request = make_request(prompt, max_tokens=NUM_TOKENS)
    for num_cached in (0, 5 * BLOCK_SIZE):
        collector = served(core, request)
        answer = collector.token_ids()
        assert answer == reference_tokens(reference, prompt, NUM_TOKENS, guess=answer)
        assert [e.num_cached_tokens for e in collector.events if isinstance(e, Started)] == [num_cached]
    assert_empty(core)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_have_pages_once_and_answer_as_transformers(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    executor = load(checkpoint(name), num_blocks=20)
    assert read_transformers_config(checkpoint(name), dtype=torch.float32).kv_layers == (0, 1, 2, 2, 1)
    shape = executor.kv.shape
    assert shape.num_layers == 3
    assert shape.windowed is not None
    assert shape.windowed.layers == (0, 2)
    assert_answers_are_those_of_transformers(make_model(name), executor, num_tokens=2 * NUM_TOKENS)


def test_shared_keys_under_another_window_are_refused_by_name(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.transformers_trial._check_windows", lambda config, windows: None)
    tried = transformers_trial._trial_run  # noqa: SLF001

    def widened(*arguments: Any) -> Any:
        *calls, last = tried(*arguments)
        return [*calls, dataclasses.replace(last, window=9)]

    monkeypatch.setattr("engine.model.transformers_trial._trial_run", widened)
    with pytest.raises(UnsupportedModel, match="layer 4 has a window of 9 over keys and values of layer 1, whose"):
        read_transformers_config(checkpoint("gemma4"), dtype=torch.float32)


def test_generate_in_two_engines_in_two_threads_keeps_them_apart(gemma2: Path, tmp_path: Path) -> None:
    make_model("gemma2", seed=1).save_pretrained(tmp_path)
    prompts = [make_prompt(num, seed=num) for num in (9, 30)]

    def answer(driver: Driver) -> list[list[int]]:
        return driver.generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=5)

    alone = [answer(Driver(load(folder))) for folder in (gemma2, tmp_path)]
    drivers = [Driver(load(folder)) for folder in (gemma2, tmp_path)]
    together: dict[int, list[list[int]]] = {}

    def run(i: int) -> None:
        together[i] = answer(drivers[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[0], together[1]] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("name", ["gemma2", "glm4_moe"])
def test_prefill_when_bfloat16_stays_near_float32(name: str, checkpoint: Callable[[str], Path]) -> None:
    exact, half = (
        prompt_logits(load_decoder(checkpoint(name), dtype), dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.dtype is torch.float32
    assert (half - exact).abs().mean() < 0.1 * exact.std()


def test_read_transformers_config_when_layers_differ_describes_each(gemma2: Path) -> None:
    config = read_transformers_config(gemma2, dtype=torch.float32)
    assert config.windows == (Window(num_tokens=7), None)
    assert config.scores == (ScoreFunction(scale=12**-0.5, softcap=2.0),) * 2
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 6, 2, 16)
    assert config.max_position_embeddings == MAX_MODEL_LEN


def test_read_transformers_config_when_frequencies_change_with_length_ends_there(tmp_path: Path) -> None:
    make_model("phi3-longrope").config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda raw: raw.update(architectures=["Phi3ForCausalLM"]))
    assert read_transformers_config(tmp_path, dtype=torch.float32).max_position_embeddings == 80


def test_read_transformers_config_when_anything_in_config_json_differs_differs(gemma2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((gemma2 / "config.json").read_text())
    same = read_transformers_config(tmp_path, dtype=torch.float32)
    edit_json(tmp_path / "config.json", lambda raw: raw.update(rms_norm_eps=1e-3))
    other = read_transformers_config(tmp_path, dtype=torch.float32)
    assert same == read_transformers_config(gemma2, dtype=torch.float32)
    assert repr(same) != repr(other)


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("deepseek_v2", {"num_key_value_heads": 4}, "latent attention"),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 72}, "chunked_attention is not supported"),
        ("qwen3_next", {"num_experts": 4}, "linear_attention is not supported"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv is not supported"),
        ("mamba", {}, "linear_attention is not supported"),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}, "layers differ in"),
        ("diffllama", {}, "8 times in all"),
        ("bloom", {}, "0 of 4 layers attend"),
        ("doge", {}, "makes its own attention mask"),
        ("bert", {}, "is not causal"),
        ("nemotron", {}, "is not handed the arguments"),
        ("gemma3", {}, "takes more than text"),
    ],
)
def test_read_transformers_config_when_the_cache_cannot_express_it_refuses_by_name(
    model_type: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_config(tmp_path, model_type, **overrides)
    with pytest.raises(UnsupportedModel, match=reason):
        read_transformers_config(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model_type": "invented", "auto_map": {"AutoConfig": "code.Config"}},
            "'invented' is unknown to transformers",
        ),
        ({"architectures": ["Gemma2ForSequenceClassification"]}, "Gemma2ForSequenceClassification is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"transformers_weights": "../other.safetensors"}, "weights in files of other names"),
        ({"num_hidden_layers": "three"}, "does not describe a 'gemma2'"),
        ({"num_key_value_heads": 4}, "cannot be tried without weights|do not divide"),
        ({"use_bidirectional_attention": True}, "is not causal"),
    ],
)
def test_read_transformers_config_when_config_json_is_unfit_refuses(
    gemma2: Path, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((gemma2 / "config.json").read_text())
    edit_json(tmp_path / "config.json", lambda raw: raw.update(change))
    with pytest.raises(UnsupportedModel, match=reason):
        read_transformers_config(tmp_path, dtype=torch.float32)


def test_load_when_architecture_is_not_a_tested_one_names_those_that_are(tmp_path: Path) -> None:
    write_config(tmp_path, "persimmon")
    with pytest.raises(UnsupportedModel, match=r"PersimmonForCausalLM is not supported.*Gemma2ForCausalLM"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.norm.weight": None}, r"1 tensors are missing in the checkpoint, model\.norm\.weight"),
        ({"model.layers.0.adapter.weight": torch.zeros(1)}, "1 tensors are of no known place"),
        ({"model.norm.weight": torch.ones(61)}, "cannot load"),
    ],
)
def test_load_when_tensors_do_not_fit_names_them(
    gemma2: Path, changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((gemma2 / "config.json").read_text())
    tensors: dict[str, torch.Tensor | None] = {**load_file(gemma2 / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=reason):
        load_decoder(tmp_path)


def test_load_when_there_are_only_pickles_refuses(gemma2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((gemma2 / "config.json").read_text())
    torch.save(load_file(gemma2 / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="only safetensors"):
        load_decoder(tmp_path)


def test_load_when_there_is_an_adapter_refuses(gemma2: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(gemma2 / name)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapters are not supported"):
        load_decoder(tmp_path)


def test_load_when_attention_differs_from_the_models_refuses(gemma2: Path) -> None:
    config = read_transformers_config(gemma2, dtype=torch.float32)
    wrong = dataclasses.replace(config, scores=(config.scores[0], ScoreFunction(scale=12**-0.5)))
    with pytest.raises(UnsupportedModel, match="differs from transformers by"):
        load_transformers_decoder(gemma2, wrong, dtype=torch.float32, device=CPU)


def test_load_prints_nothing(gemma2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_decoder(gemma2)
    assert capfd.readouterr() == ("", "")
