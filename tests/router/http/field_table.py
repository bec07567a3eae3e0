"""Writes what the door does with every field of the APIs into a document, by sending each of them.

    python -m tests.router.http.field_table docs/openai.md docs/anthropic.md

A table stands under a line `<!-- fields: API API ... -->`, with a column for each API. The fields are those of the
types of the `openai` and `anthropic` packages, those of our own bodies, and other servers' that the door knows. A
further API is one entry of `APIS`, with its values in field_values.py.
"""

import asyncio
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from typing_extensions import is_typeddict

from common.config import parse_config
from kvrelay.v1 import sequence_pb2
from router.http.anthropic.schema import CountTokensBody, MessagesBody
from router.http.responses.body import ResponsesBody
from router.http.schema import ChatBody, CompletionBody, EmbeddingBody
from router.http.strict import option_schemas
from tests.router.fake_worker import DECODE, PREFILL, FakeWorker, Shape
from tests.router.http import field_values
from tests.router.http.clients import fetch, http_cluster
from tests.router.http.field_values import Values

_TABLE = re.compile(r"(<!-- fields: ([\w ]+) -->\n)(?:\|.*\n)*")
_MEANINGLESS = frozenset(("id", "item_id", "call_id", "created", "created_at", "completed_at", "cached_tokens"))
"""Members of answers that differ from call to call."""
TAKEN, BY_MODEL, IGNORED, LEFT_OUT = "taken", "taken where the model can", "ignored", "left out"
REFUSED, ABSENT = "refused", ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One endpoint with a body."""

    path: str
    author: str = "OpenAI"
    params: tuple[Any, ...]
    """Types of the author's client that list its fields."""
    body: type[BaseModel]
    base: Mapping[str, Any]
    """A request; one field at a time is added to it."""
    values: Mapping[str, Values]


_SAMPLED = {"temperature": 1.0, "seed": 1}
_TURNS = [{"role": "user", "content": "Tell me about rivers."}]
APIS: Mapping[str, Api] = {
    "chat": Api(
        path="/v1/chat/completions",
        params=(
            chat_create_params.CompletionCreateParamsNonStreaming,
            chat_create_params.CompletionCreateParamsStreaming,
        ),
        body=ChatBody,
        base={"messages": _TURNS, "max_tokens": 9, **_SAMPLED},
        values=field_values.CHAT,
    ),
    "completions": Api(
        path="/v1/completions",
        params=(
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
        body=CompletionBody,
        base={"prompt": "Tell me about rivers.", "max_tokens": 9, **_SAMPLED},
        values=field_values.COMPLETIONS,
    ),
    "responses": Api(
        path="/v1/responses",
        params=(
            response_create_params.ResponseCreateParamsNonStreaming,
            response_create_params.ResponseCreateParamsStreaming,
        ),
        body=ResponsesBody,
        base={"input": "Tell me about rivers.", "max_output_tokens": 9, **_SAMPLED},
        values=field_values.RESPONSES,
    ),
    "embeddings": Api(
        path="/v1/embeddings",
        params=(embedding_create_params.EmbeddingCreateParams,),
        body=EmbeddingBody,
        base={"input": "Tell me about rivers."},
        values=field_values.EMBEDDINGS,
    ),
    "messages": Api(
        path="/v1/messages",
        author="Anthropic",
        params=(
            message_create_params.MessageCreateParamsNonStreaming,
            message_create_params.MessageCreateParamsStreaming,
        ),
        body=MessagesBody,
        base={"messages": _TURNS, "max_tokens": 9, **_SAMPLED},
        values=field_values.MESSAGES,
    ),
    "count_tokens": Api(
        path="/v1/messages/count_tokens",
        author="Anthropic",
        params=(message_count_tokens_params.MessageCountTokensParams,),
        body=CountTokensBody,
        base={"messages": _TURNS},
        values=field_values.COUNT_TOKENS,
    ),
}


async def write_tables(text: str) -> str:
    """Return a document with its tables written anew, by what a door in this process does."""
    names = {name for found in _TABLE.finditer(text) for name in found[2].split()}
    # The model thinks, so that what is said about thoughts has a meaning.
    router = {"http_port": 0, "policy": "round_robin", "local_prefill_max_tokens": 4096}
    config = parse_config({"model": {"engine": "fake", "reasoning_parser": "qwen3"}, "router": router}, source="test")
    shape = Shape(max_model_len=4096, num_blocks=4096)
    workers = FakeWorker("p0", PREFILL, shape), FakeWorker("d0", DECODE, shape)
    async with http_cluster(*workers, config=config) as http:
        found = {name: await Asked(http.port, workers, APIS[name]).outcomes() for name in sorted(names)}
    return _TABLE.sub(lambda place: place[1] + _table(place[2].split(), found), text)


def _table(names: list[str], outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table: the fields of the author's APIs, then the further ones; those with equal outcomes share a row."""
    official = {field for name in names for field in official_fields(APIS[name])}
    fields = {field for name in names for field in outcomes[name]}
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in sorted(fields, key=lambda field: (field not in official, field)):
        of = APIS[names[0]].author if field in official else "extension"
        rows.setdefault((of, *(outcomes[name].get(field, ABSENT) for name in names)), []).append(f"`{field}`")
    head = ["fields", "of", *(f"`{APIS[name].path}`" for name in names)]
    cells = [head, ["---"] * len(head), *([", ".join(same), *row] for row, same in rows.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A door that is asked for one API, and the workers behind it."""

    port: int
    workers: tuple[FakeWorker, ...]
    api: Api
    expected: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What was seen of each request without the field in question."""

    async def outcomes(self) -> dict[str, str]:
        """Return what the door does with each field."""
        return {field: await self._outcome(field) for field in sorted(fields_of(self.api))}

    async def _outcome(self, field: str) -> str:
        values = self.api.values[field]
        expected = await self._expected(values.beside)
        status, seen = await self._send_with(field, values.sensible)
        if status != 200 and "this model" in seen["error"]["message"]:
            return BY_MODEL
        if status != 200:
            self._check_refusal(field, seen)
            return await self._only_as(field)
        if seen == [*expected[:-1], True]:
            return LEFT_OUT
        if seen != expected:
            return TAKEN
        for value in values.others:
            if await self._send_with(field, value) != (200, expected):
                return TAKEN
        return IGNORED

    async def _expected(self, beside: Mapping[str, Any]) -> Any:
        """Return what is seen of a request without the field."""
        key = json.dumps(beside)
        if key not in self.expected:
            status, self.expected[key] = await self._send({**self.api.base, **beside})
            assert status == 200, f"{self.api.path}: {beside} is refused: {self.expected[key]}"
        return self.expected[key]

    async def _only_as(self, field: str) -> str:
        """Return with which values alone a field is taken."""
        known = option_schemas(self.api.body).get(field, {}).get("enum", ())
        candidates = [value for value in (*known, *self.api.values[field].default) if value is not None]
        taken = [value for value in candidates if (await self._send_with(field, value))[0] == 200]
        return "only " + ", ".join(f"`{json.dumps(value)}`" for value in taken) if taken else REFUSED

    def _check_refusal(self, field: str, answer: Any) -> None:
        """Fail unless the refusal is one of this field: for any other, the values have to be corrected."""
        param = str(answer["error"]["param"])
        assert param.startswith(field) or field.startswith(param), f"{self.api.path}: {field}: {answer}"

    async def _send_with(self, field: str, value: Any) -> tuple[int, Any]:
        """Send a request with one more field, which may be the member of an object."""
        outer, _, inner = field.partition(".")
        return await self._send(
            {**self.api.base, **self.api.values[field].beside, outer: {inner: value} if inner else value}
        )

    async def _send(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Send a request; return its status, and its visible effects that are the same at every call.

        These are the error; or the answer, what the workers were asked for, and whether there is a warning.
        """
        for worker in self.workers:
            worker.requests.clear()
        status, headers, raw = await fetch(self.port, "POST", self.api.path, json.dumps(body).encode())
        if status != 200:
            return status, json.loads(raw)
        answer = _lasting(json.loads(raw)) if raw.startswith(b"{") else _shape(raw)
        sent = [_sent(request.sequence) for worker in self.workers for request in worker.requests]
        return status, [answer, sent, "warning" in headers]


def _sent(sequence: sequence_pb2.SequenceSpec) -> bytes:
    """Return what a worker was asked for, without ids."""
    lasting = sequence_pb2.SequenceSpec(
        sampling=sequence.sampling,
        prompt_tokens=sequence.prompt_tokens,
        pooling=sequence.pooling,
        hash_root=sequence.hash_root,
    )
    if sequence.HasField("cache_pins"):
        lasting.cache_pins.CopyFrom(sequence.cache_pins)
    if sequence.HasField("tpot_slo_s"):
        lasting.tpot_slo_s = sequence.tpot_slo_s
    return lasting.SerializeToString(deterministic=True)


def _shape(raw: bytes) -> Any:
    """Return the members that the events of a stream have: which tokens share an event depends on time."""
    events = [json.loads(found) for found in re.findall(rb"^data: (\{.*\})\r?$", raw, re.MULTILINE)]
    return sorted({path for event in events for path in _paths(event)})


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every member."""
    yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _paths(each, f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from _paths(each, f"{path}[]")


def _lasting(value: Any) -> Any:
    """Return an answer without what differs from call to call; of a report, that there is one."""
    if isinstance(value, dict):
        kept = {name: _lasting(each) for name, each in value.items() if name not in _MEANINGLESS}
        return kept | {"kvrelay": None} if "kvrelay" in kept else kept
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def fields_of(api: Api) -> set[str]:
    """Return all fields of an API that its author or the door know, members of objects as `outer.inner`."""
    members = {f"{name}.{inner}" for name, kind in _objects(api).items() for inner in kind.model_fields}
    return {*api.body.model_fields, *option_schemas(api.body), *members, *official_fields(api)}


def official_fields(api: Api) -> set[str]:
    """Return the fields in the types of the author's client; members of those objects that are objects here, too."""
    hints = {name: hint for each in api.params for name, hint in typing.get_type_hints(each).items()}
    members = {
        f"{name}.{inner}"
        for name in _objects(api)
        for kind in _classes(hints.get(name))
        for inner in kind.__annotations__
    }
    return {*hints, *members}


def _objects(api: Api) -> dict[str, type[BaseModel]]:
    """Return the fields that are objects, each of whose members can be sent alone."""
    return {
        name: kind
        for name, field in api.body.model_fields.items()
        for kind in _classes(field.annotation)
        if not any(member.is_required() for member in kind.model_fields.values())
    }


def _classes(annotation: Any) -> Iterator[type[Any]]:
    """Yield the models and typed dicts in an annotation, except those in lists."""
    if typing.get_origin(annotation) is list:
        return
    if isinstance(annotation, type) and (is_typeddict(annotation) or issubclass(annotation, BaseModel)):
        yield annotation
    for each in typing.get_args(annotation):
        yield from _classes(each)


async def _main() -> None:
    for path in map(Path, sys.argv[1:]):
        path.write_text(await write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_main())
