"""Random weights of published shapes: equal on all machines, and usable like any checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from common.config import parse_config as parse_serving
from common.fake_tokenizer import generated_tokenizer
from common.model_files import ModelNotFound, resolve_model
from common.random_models import CONFIGS, SEED_FILE, RandomModel
from common.sampling import SamplingParams
from engine.model.loader import kv_fingerprint, load_weights, weight_files
from engine.weights.config import UnsupportedModel, parse_config
from engine.weights.layout import allocate_weights, checkpoint_views
from engine.weights.random_weights import fill_random, fill_weights
from tests.caches import empty_cache
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.tiny_models import reference_tokens
from worker.inprocess import LocalEngine

CPU, META = torch.device("cpu"), torch.device("meta")
PARAMETER_COUNTS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(cache))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, for tests that change or count its content."""
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    return tmp_path


def folder_of(name: str) -> Path:
    return resolve_model(f"random:{name}", local_files_only=True)


def peer_of(folder: Path, *, device: torch.device, **changes: Any) -> Any:
    with device:
        auto_model: Any = transformers.AutoModelForCausalLM
        return auto_model.from_config(transformers.AutoConfig.from_pretrained(folder, **changes), dtype=torch.float32)


def by_checkpoint_names(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's parameters under their names in a checkpoint, which has each expert's matrices apart."""
    named = {}
    biases = ((name, each) for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    for name, parameter in (*model.named_parameters(), *biases):
        name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
        path, _, field = name.rpartition(".experts.")
        if not path:
            named[name] = parameter.detach()
            continue
        for i, expert in enumerate(parameter.detach()):
            modules = ("gate_proj", "up_proj") if field.startswith("gate_up_proj") else ("down_proj",)
            if model.config.model_type == "gpt_oss":  # inputs by outputs, those of gate and up in turn
                parts = [expert.movedim(-1, 0)[first :: len(modules)] for first in range(len(modules))]
            else:
                parts = list(expert.chunk(len(modules)))
            kind = "bias" if field.endswith("_bias") else "weight"
            pairs = zip(modules, parts, strict=True)
            named |= {f"{path}.experts.{i}.{module}.{kind}": part for module, part in pairs}
    return named


def split_mix(key: int, position: int) -> int:
    """Return the published generator's output, by Python integers."""
    mask = (1 << 64) - 1
    z = (position * 0x9E3779B97F4A7C15 + key) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_config_when_published_has_the_published_number_of_parameters(name: str) -> None:
    config = parse_config(CONFIGS[name])
    weights = allocate_weights(config, dtype=torch.bfloat16, device=META)
    assert sum(view.numel() for view in checkpoint_views(weights, config).values()) == PARAMETER_COUNTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_gives_the_tensor_names_and_shapes_of_transformers(name: str) -> None:
    few = {"num_hidden_layers": CONFIGS[name].get("full_attention_interval", 2)}
    config = parse_config({**CONFIGS[name], **few})
    ours = checkpoint_views(allocate_weights(config, dtype=torch.bfloat16, device=META), config)
    theirs = by_checkpoint_names(peer_of(folder_of(name), device=META, **few))
    assert {key: view.shape for key, view in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fill_random_when_tensor_spans_chunks_follows_the_published_generator() -> None:
    tensor = torch.empty(2, 70_000)
    fill_random({"a.weight": tensor}, seed=3, std=0.02)
    key = int.from_bytes(hashlib.blake2b(b"3\0a.weight", digest_size=8).digest(), "little")
    bound = 0.02 * 3**0.5
    for position in (0, 1, 65_535, 65_536, 139_999):
        upper = split_mix(key, position) >> 40
        signed = upper - (1 << 24) if upper >= 1 << 23 else upper
        assert tensor.view(-1)[position].item() == pytest.approx((signed + 0.5) * bound / (1 << 23), rel=1e-6)


def test_fill_random_when_tensor_is_a_norm_or_a_bias_makes_it_neutral() -> None:
    norm, bias = torch.zeros(5), torch.ones(5)
    fill_random(
        {"model.layers.0.self_attn.q_norm.weight": norm, "model.layers.0.self_attn.q_proj.bias": bias}, seed=0, std=1
    )
    assert norm.tolist() == [1.0] * 5
    assert bias.tolist() == [0.0] * 5


def test_fill_weights_when_dtypes_differ_rounds_the_same_numbers() -> None:
    config = parse_config(CONFIGS["tiny"])
    made = [allocate_weights(config, dtype=dtype, device=CPU) for dtype in (torch.float32, torch.bfloat16)]
    for weights in made:
        fill_weights(weights, RandomModel(name="tiny"), config)
    exact, rounded = (checkpoint_views(weights, config) for weights in made)
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


# ── a checkpoint like any other ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-llama", "tiny-moe", "tiny-deepseek", "tiny-granite4", "tiny-qwen3-next"]
)
def test_executor_when_weights_are_random_answers_as_transformers_filled_with_them(name: str) -> None:
    folder = folder_of(name)
    peer = peer_of(folder, device=CPU).eval()
    fill_random(by_checkpoint_names(peer), seed=0, std=CONFIGS[name]["initializer_range"])
    executor = load(folder, model_name=name, num_blocks=64)
    prompt = list(range(3, 300, 7))
    [answer] = Driver(executor).generate([make_sequence(prompt)], num_tokens=24, chunk_size=11)
    assert answer == reference_tokens(peer, prompt, 24, guess=answer)
    assert executor.eos_token_ids == {511}


def test_local_engine_when_model_is_random_generates_text() -> None:
    pool = {"num_blocks": 32}
    config = parse_serving(
        {"model": {"id": "random:tiny"}, "pools": {"prefill": pool, "decode": pool}}, source="serving.yaml"
    )
    engine = LocalEngine.load(config)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    tokens = list(engine.stream(engine.tokenizer.encode("hello").ids, sampling))
    assert len(tokens) == 12
    assert "".join(token.text for token in tokens).strip()
    assert engine.executor.model_name == "random:tiny"


def test_fingerprint_when_seed_dtype_or_name_differ_differs() -> None:
    def fingerprint(name: str, dtype: str) -> str:
        config = parse_config(json.loads((folder_of(name) / "config.json").read_text()))
        return kv_fingerprint(config, weight_files(folder_of(name)), dtype=dtype, block_size=16)

    cases = [("tiny", "float32"), ("tiny:1", "float32"), ("tiny", "bfloat16"), ("tiny-llama", "float32")]
    assert len({fingerprint(*case) for case in cases}) == len(cases)
    assert fingerprint("tiny", "float32") == fingerprint("tiny:0", "float32")


@pytest.mark.usefixtures("own_cache")
def test_load_weights_when_seed_file_is_of_another_version_says_so() -> None:
    folder = folder_of("tiny")
    (folder / SEED_FILE).write_text(json.dumps({"name": "tiny", "seed": 0, "format": 99}))
    with pytest.raises(UnsupportedModel, match="another version"):
        load_weights(weight_files(folder), parse_config(CONFIGS["tiny"]), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("model_id", ["random:", "random:gpt-5", "random:tiny:x", "random:tiny:-1", "random:../tiny"])
def test_resolve_model_when_random_model_is_unknown_says_what_there_is(model_id: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no random model|not a number"):
        resolve_model(model_id, local_files_only=True)


# ── tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_generated_tokenizer_when_any_text_is_encoded_gives_its_bytes() -> None:
    tokenizer = generated_tokenizer(1000, eos_token_id=999)
    text = "kvrelay, für 3 € – ok\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_generated_tokenizer_when_published_size_has_one_text_per_id() -> None:
    path = folder_of("qwen3-0.6b") / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 151_936
    assert tokenizer.id_to_token(151_645) == "<|end|>"
    assert tokenizer.decode([300, 151_645, 151_935]).startswith(" ")
    assert len({tokenizer.id_to_token(token_id) for token_id in range(151_936)}) == 151_936
