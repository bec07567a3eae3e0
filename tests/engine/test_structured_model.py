"""Structured answers of the default model's first layer: whatever it would say, an answer has its structure."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import tokenizers

from common.config import ServingConfig, parse_config
from common.errors import InvalidRequest
from common.sampling import SamplingParams
from common.structured_outputs import structure_text
from engine.text.grammar import Grammars
from tests.builders import FAKE_GRAMMARS
from tests.engine.schemas import random_schema, suite
from tests.short_model import cut_tokenizer, write_short_model
from worker.inprocess import LocalEngine, SampleText

pytestmark = pytest.mark.model

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]},
    {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 30}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 7, None]},
    {"type": "string", "pattern": "^[a-z]{2,5}@[a-z]{2,5}\\.org$"},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}]},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "point"},
            "at": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}], "maxItems": 2},
            "next": {"$ref": "#/$defs/node"},
        },
        "required": ["kind", "next"],
        "additionalProperties": False,
        "$defs": {
            "node": {"type": "object", "properties": {"id": {"type": "integer", "maximum": 9}}, "required": ["id"]}
        },
    },
    {"oneOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
]
MAX_TOKENS = 60
VOCAB_SIZE = 2048
NUM_RANDOM = int(os.environ.get("KVRELAY_SCHEMAS", "8"))
"""Further schemas, drawn by chance; a night's run has 500, and all of JSON-Schema-Test-Suite."""


@pytest.fixture(name="prompt", scope="module")
def _prompt(model_dir: Path) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return list(tokenizer.encode("Write a short poem about the sea.").ids)


@pytest.fixture(name="model_dir", scope="module")
def _model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_short_model(tmp_path_factory.mktemp("short"), num_layers=1, vocab_size=VOCAB_SIZE)
    cut_tokenizer(folder, VOCAB_SIZE)
    return folder


def sampling(schema: dict[str, Any], seed: int, max_tokens: int = MAX_TOKENS) -> SamplingParams:
    structure = structure_text({"json": schema})
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=structure)


def is_taken(schema: Any) -> bool:
    """Return whether a schema of the suite is compiled."""
    try:
        FAKE_GRAMMARS.compile(structure_text({"json": schema}))
    except (InvalidRequest, TypeError):
        return False
    return True


@pytest.fixture(autouse=True, scope="module")
def _one_compiler() -> Iterator[None]:
    """Let all engines share a compiler, which reads the vocabulary for a second."""
    made: list[Grammars] = []

    def compiler(*args: Any, **options: Any) -> Grammars:
        made[:] = made or [Grammars(*args, **options)]
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.inprocess.Grammars", compiler)
        yield


def config_of(model_dir: Path, **pool: Any) -> ServingConfig:
    pools = {name: {"kv_memory_gib": 0.25, **pool} for name in ("prefill", "decode")}
    return parse_config({"model": {"id": str(model_dir), "dtype": "float32"}, "pools": pools}, source="test")


@pytest.fixture(name="engine", scope="module")
def _engine(model_dir: Path) -> LocalEngine:
    return LocalEngine.load(config_of(model_dir))


def texts_of(events: list[SampleText]) -> dict[int, tuple[str, str | None]]:
    """Return text and finish reason of each request."""
    found: dict[int, tuple[str, str | None]] = {}
    for event in events:
        text = found.get(event.request_idx, ("", None))[0]
        found[event.request_idx] = (text + event.text, event.finish_reason)
    return found


def test_every_finished_answer_of_a_model_is_valid(prompt: list[int], engine: LocalEngine) -> None:
    asked = [(schema, seed) for seed, schema in enumerate(SCHEMAS)]
    asked += [(random_schema(number), number) for number in range(NUM_RANDOM)]
    if NUM_RANDOM >= 500:
        asked += [(group.schema, 1) for group in suite() if is_taken(group.schema)]
    answers: list[tuple[str, str | None]] = []
    for start in range(0, len(asked), 100):
        part = asked[start : start + 100]
        batch = texts_of(list(engine.stream_all([(prompt, sampling(*each)) for each in part])))
        answers += [batch[idx] for idx in range(len(part))]
    num_finished = 0
    for (schema, _seed), (text, reason) in zip(asked, answers, strict=True):
        if reason == "stop":
            num_finished += 1
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
    assert num_finished >= len(asked) // 2, "most answers end before max_tokens"


def test_answers_are_the_same_alone_in_a_batch_cached_chunked_and_preempted(
    prompt: list[int], model_dir: Path, engine: LocalEngine
) -> None:
    # With their prompts, of different lengths, they fill more than the six blocks below.
    asked = [(prompt + prompt[: 2 * number], sampling(schema, number, 12)) for number, schema in enumerate(SCHEMAS)]
    expected = {idx: texts_of(list(engine.stream(*each)))[0] for idx, each in enumerate(asked)}
    cached = texts_of(list(engine.stream_all(asked)))
    small_steps = config_of(model_dir, max_step_tokens=8, max_running=8)
    chunked = texts_of(list(LocalEngine(engine.executor, engine.tokenizer, small_steps).stream_all(asked)))
    tight = LocalEngine.load(config_of(model_dir, kv_memory_gib="auto", num_blocks=6))
    preempted = texts_of(list(tight.stream_all(asked)))
    assert cached == chunked == preempted == expected
    assert tight.load_report().num_preemptions > 0
