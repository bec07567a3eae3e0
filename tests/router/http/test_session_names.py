"""Names of sessions as clients send them: anything is taken or refused by its field, and little of it is kept."""

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock

import pytest

from common.errors import InvalidRequest
from router.http.anthropic.calls import read_messages_body
from router.http.exchange import Exchange
from router.http.generation import read_chat, read_completion
from router.http.responses.call import read_response
from router.record.sessions import MAX_SESSION_CHARS

TURNS = {"messages": [{"role": "user", "content": "hi"}]}
LONG = "x" * (1 << 20)


@pytest.mark.parametrize("user_id", [5, 1.5, True, None, ["a"], {"a": 1}, ""])
def test_user_id_that_is_no_text_names_no_session(user_id: Any) -> None:
    body = json.dumps({**TURNS, "max_tokens": 1, "metadata": {"user_id": user_id}}).encode()
    assert read_messages_body(body).requests[0].session_id == ""


def test_name_of_a_megabyte_does_not_travel_with_each_prompt_of_a_call() -> None:
    calls = [
        read_messages_body(json.dumps({**TURNS, "max_tokens": 1, "metadata": {"user_id": LONG}}).encode()),
        read_chat(json.dumps({**TURNS, "prompt_cache_key": LONG}).encode()),
        read_completion(json.dumps({"prompt": ["hi"] * 128, "prompt_cache_key": LONG}).encode()),
    ]
    names = {request.session_id for call in calls for request in call.requests}
    assert names == {LONG[:MAX_SESSION_CHARS]}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({name: LONG}, name) for name in ("prompt_cache_key", "user", "safety_identifier")),
        ({"metadata": {"a": LONG}}, "metadata.a"),
        ({"metadata": {LONG: "a"}}, f"metadata.{LONG[:80]}.[key]"),
        ({"text": {"format": {"type": "json_object", "description": LONG}}}, "text.format.description"),
    ],
    ids=range(6),
)
def test_text_that_streams_repeat_is_refused_by_its_name_when_it_is_very_long(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_response(json.dumps({"input": "hi", **given}).encode())
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000, "the answer repeats what was refused"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"x-session-id", b"\xff\x00" * 30_000), (b"x-session-id", b"other")], "\xff\x00" * (MAX_SESSION_CHARS // 2)),
        ([(b"x-session-id", b"")], ""),
        ([], ""),
    ],
    ids=range(3),
)
async def test_header_of_any_bytes_names_a_session(headers: list[tuple[bytes, bytes]], expected: str) -> None:
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": headers}
    exchange = Exchange(scope, asyncio.Event().wait, AsyncMock(), max_body_bytes=1)  # type: ignore[arg-type]
    assert exchange.session_name == expected
