"""Marks of Anthropic's API stand where its blocks end in the conversation that is made of them."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2 as pb
from router.http.anthropic.calls import read_messages_body
from tests.router.http.anthropic.test_turns import CALL, HI, RESULT, TOOL, text

MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h", "scope": "global"}


def marks(**fields: Any) -> list[pb.CacheMark]:
    raw = json.dumps({"max_tokens": 5, "messages": [HI], **fields}).encode()
    (request,) = read_messages_body(raw).requests
    return list(request.cache_marks)


def at(index: int, num_chars: int | None, *, ttl_s: float = 300.0) -> pb.CacheMark:
    return pb.CacheMark(message=pb.MessageEnd(index=index, num_chars=num_chars), ttl_s=ttl_s)


def test_marks_are_read_in_the_order_of_a_prompt() -> None:
    given = marks(
        tools=[TOOL | {"cache_control": HOUR}, {"type": "web_search_1", "cache_control": None}],
        system=[text("be", cache_control=HOUR), text("brief")],
        messages=[{"role": "user", "content": [text("hi", cache_control=MINUTES), text("you")]}],
        cache_control=MINUTES,
    )
    assert given == [
        pb.CacheMark(num_tools=1, ttl_s=3600),
        at(0, 2, ttl_s=3600),
        at(1, 2),
        pb.CacheMark(ttl_s=300),
    ]


def test_marks_of_results_and_calls_stand_in_the_turns_that_these_become() -> None:
    failed = RESULT | {"is_error": True, "content": [text("no", cache_control=MINUTES), text("way")]}
    given = marks(
        messages=[
            HI,
            {"role": "assistant", "content": [text("let me"), CALL | {"cache_control": MINUTES}]},
            {"role": "user", "content": [failed, RESULT | {"cache_control": MINUTES}, text("so?", cache_control=HOUR)]},
        ]
    )
    assert given == [at(1, None), at(2, len("Error: no")), at(3, len("12:00")), at(4, 3, ttl_s=3600)]


def test_line_that_changes_with_each_request_is_no_part_of_what_is_marked() -> None:
    line = "x-anthropic-billing-header: cc_version=1; cch=2\n"
    assert marks(system=[text(line, cache_control=MINUTES), text("be brief", cache_control=MINUTES)]) == [
        at(0, 0),
        at(0, len("\nbe brief")),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cache_control": {"type": "lasting"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"system": [text("be", cache_control="yes")]}, "system[0].cache_control.type"),
        (
            {"messages": [HI, {"role": "user", "content": [text("a", cache_control=HOUR)] * 5}]},
            "messages[1].content[4]",
        ),
        ({"system": [text("a", cache_control=HOUR)] * 4, "cache_control": HOUR}, "cache_control"),
    ],
)
def test_marks_that_cannot_be_are_refused_by_their_place(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        marks(**fields)
    assert caught.value.field is not None and caught.value.field.startswith(field)
    assert field in str(caught.value)
