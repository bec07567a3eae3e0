"""OpenAI's options of the prompt cache become marks, at the latest breakpoints and at the end of the prompt."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2 as pb
from router.http.calls import chat_call, completion_call
from router.http.responses.call import read_response
from router.http.schema import ChatBody, CompletionBody
from router.http.strict import parse_body

POINT = {"mode": "explicit"}
DAY, HALF_HOUR = 86400.0, 1800.0


def part(said: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": said, **more}


def chat(*contents: Any, **fields: Any) -> list[pb.CacheMark]:
    messages = [{"role": "user", "content": content} for content in contents or ["hi"]]
    body = parse_body(ChatBody, json.dumps({"messages": messages, **fields}).encode())
    return list(chat_call(body).requests[0].cache_marks)


def responses(items: Any, **fields: Any) -> list[pb.CacheMark]:
    return list(read_response(json.dumps({"input": items, **fields}).encode()).requests[0].cache_marks)


def at(index: int, num_chars: int, ttl_s: float = HALF_HOUR) -> pb.CacheMark:
    return pb.CacheMark(message=pb.MessageEnd(index=index, num_chars=num_chars), ttl_s=ttl_s)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}, None),
        ({"prompt_cache_retention": "24h"}, DAY),
        ({"prompt_cache_options": {}}, HALF_HOUR),
        ({"prompt_cache_options": {"ttl": "12h", "comparison_response_id": "r", "prewarm": False}}, 43200.0),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"}, DAY),
    ],
)
def test_options_mark_the_end_of_every_kind_of_prompt(fields: dict[str, Any], expected: float | None) -> None:
    marks = [] if expected is None else [pb.CacheMark(ttl_s=expected)]
    assert chat(**fields) == responses("hi", **fields) == marks
    body = parse_body(CompletionBody, json.dumps({"prompt": ["a", "b"], **fields}).encode())
    assert [list(request.cache_marks) for request in completion_call(body).requests] == [marks, marks]


def test_latest_breakpoints_are_marked_and_the_end_takes_the_place_of_one() -> None:
    contents = [[part("one", prompt_cache_breakpoint=POINT), part("two")] for _ in range(4)]
    contents.append([part("one"), part("two", prompt_cache_breakpoint=POINT | {"ttl": "1h"})])
    latest = [at(2, 3), at(3, 3), at(4, len("one\ntwo"), 3600)]
    assert chat(*contents) == [at(1, 3), *latest]
    assert chat(*contents, prompt_cache_options={"mode": "explicit"}) == [at(1, 3), *latest]
    assert chat(*contents, prompt_cache_options={"ttl": "30m"}) == [pb.CacheMark(ttl_s=HALF_HOUR), *latest]


def test_null_in_a_breakpoint_counts_as_left_out() -> None:
    assert chat([part("a", prompt_cache_breakpoint={"mode": None, "ttl": None})]) == [at(0, 1)]


def test_breakpoints_of_items_stand_in_the_messages_that_these_become() -> None:
    items = [
        {"role": "user", "content": [part("hi", "input_text", prompt_cache_breakpoint=POINT)]},
        {"type": "reasoning", "summary": [part("hm", "summary_text")]},
        {"role": "assistant", "content": [part("well", "output_text", prompt_cache_breakpoint=POINT)]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [part("12", "input_text", prompt_cache_breakpoint=POINT)],
        },
    ]
    assert responses(items) == [at(0, 2), at(1, 4), at(2, 2)]
    assert responses(items, instructions="Be brief.") == [at(1, 2), at(2, 4), at(3, 2)]


@pytest.mark.parametrize(
    ("content", "fields", "field"),
    [
        ("hi", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ("hi", {"prompt_cache_options": {"ttl": "2h"}}, "prompt_cache_options.ttl"),
        ("hi", {"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
        ([part("a", prompt_cache_breakpoint={"mode": "x"})], {}, "messages[0].content[0].prompt_cache_breakpoint"),
        ([part("a", prompt_cache_breakpoint={"ttl": 5})], {}, "messages[0].content[0].prompt_cache_breakpoint.ttl"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(content: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(content, **fields)
    assert caught.value.field == field
