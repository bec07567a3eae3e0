"""Structured answers of the real model: whatever it would like to say, they have their structure."""

import json
import os
from typing import Any

import jsonschema_rs
import pytest
import tokenizers

from common.config import parse_config
from common.model_files import default_model_dir
from common.sampling import SamplingParams
from common.structured_outputs import structure_text
from tests.engine.schemas import random_schema
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
NUM_RANDOM = int(os.environ.get("KVRELAY_SCHEMAS", "16"))
"""Further schemas, drawn by chance; a night's run has 500."""


@pytest.fixture(name="engine", scope="module")
def _engine() -> LocalEngine:
    pool = {"kv_memory_gib": 0.5}
    config = {"model": {"dtype": "float32"}, "pools": {"prefill": pool, "decode": pool}}
    return LocalEngine.load(parse_config(config, source="test"))


@pytest.fixture(name="prompt", scope="module")
def _prompt() -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    return list(tokenizer.encode("Write a short poem about the sea.").ids)


def sampling(schema: dict[str, Any], seed: int) -> SamplingParams:
    structure = structure_text({"json": schema})
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, structured_outputs=structure)


def texts_of(events: list[SampleText]) -> dict[int, tuple[str, str | None]]:
    """Return text and finish reason of each request."""
    found: dict[int, tuple[str, str | None]] = {}
    for event in events:
        text = found.get(event.request_idx, ("", None))[0]
        found[event.request_idx] = (text + event.text, event.finish_reason)
    return found


def test_every_finished_answer_is_valid_and_the_same_alone_and_in_a_batch(
    engine: LocalEngine, prompt: list[int]
) -> None:
    asked = [(schema, seed) for schema in SCHEMAS for seed in range(2)]
    asked += [(random_schema(number), number) for number in range(NUM_RANDOM)]
    batch = texts_of(list(engine.stream_all([(prompt, sampling(*each)) for each in asked])))
    num_finished = 0
    for idx, (schema, seed) in enumerate(asked):
        text, reason = batch[idx]
        if reason == "stop":
            num_finished += 1
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
        if not seed and idx < 6:
            alone = texts_of(list(engine.stream(prompt, sampling(schema, seed))))
            assert alone[0] == (text, reason)
    assert num_finished >= len(asked) // 2, "most answers end before max_tokens"
