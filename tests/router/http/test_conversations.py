"""Conversations are read by hand: what the OpenAPI document does not allow is refused, wherever it stands."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from common.errors import InvalidRequest
from router.http.anthropic.turns import read_turns
from router.http.messages import read_messages
from router.http.responses.items import read_input
from router.http.routes import openapi_document

MISSING = object()
WRONG: tuple[Any, ...] = (
    MISSING,
    None,
    "",
    "x",
    "user",
    "function",
    "text",
    0,
    True,
    [],
    ["x"],
    [None],
    {},
    {"type": "text"},
)
"""Stands in for each member and each entry of an example."""

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning": "r", "reasoning_content": "r"},
    {"role": "tool", "content": "a", "tool_call_id": "c1"},
]
ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}], "is_error": False}
        ],
    },
]
RESPONSES = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "r"}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "o"},
]


def changed(value: Any) -> Iterator[Any]:
    """Yield the value with something wrong in each place within it."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for wrong in (*WRONG, *changed(value[key])):
            changes = {key: wrong}
            if isinstance(value, dict):
                yield {name: each for name, each in (value | changes).items() if each is not MISSING}
            else:
                yield [each for place, old in enumerate(value) if (each := changes.get(place, old)) is not MISSING]


def is_refused(read: Callable[[Any], object], given: Any) -> bool:
    try:
        read(given)
    except InvalidRequest as refusal:
        assert refusal.field
        return True
    return False


@pytest.mark.parametrize(
    ("body", "field", "example", "read"),
    [
        ("ChatBody", "messages", CHAT, read_messages),
        ("MessagesBody", "messages", ANTHROPIC, lambda given: read_messages(read_turns(None, given))),
        ("ResponsesBody", "input", RESPONSES, lambda given: read_messages(read_input(given))),
    ],
)
def test_what_the_document_does_not_allow_is_refused(
    body: str, field: str, example: list[Any], read: Callable[[Any], object]
) -> None:
    allowed = jsonschema_rs.validator_for(openapi_document()["components"]["schemas"][body]["properties"][field])
    num_refused = 0
    assert allowed.is_valid(example)
    assert not is_refused(read, example)
    for message in example:
        once = list(changed([message]))
        for given in itertools.chain(once, *map(changed, once)):
            refused = is_refused(read, given)
            assert refused or allowed.is_valid(given), given
            num_refused += refused
    assert num_refused > 1000
