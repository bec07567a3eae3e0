"""Whatever an answer holds can be sent back with the next request, as it is."""

import json
from typing import Any

import pytest

from common.chat_template import LineTemplate
from router.http.anthropic.calls import read_messages_body
from router.http.anthropic.turns import read_turns
from router.http.generation import read_chat
from router.http.messages import read_messages
from router.http.responses.call import read_response
from router.http.responses.items import read_input
from router.reading.conversation import ChatFormats, read_conversation
from tests.router.http.clients import CHAT, HttpCluster

USER: dict[str, Any] = {"role": "user", "content": "hi"}
AGAIN: dict[str, Any] = {"role": "user", "content": "again"}


async def ask(http: HttpCluster, path: str, **body: Any) -> Any:
    status, _headers, answer = await http.post(path, body)
    assert status == 200, answer
    return answer


async def test_answers_of_every_door_go_back_as_they_are(http: HttpCluster) -> None:
    told = await ask(http, CHAT, messages=[USER], max_tokens=1)
    await ask(http, CHAT, messages=[USER, told["choices"][0]["message"], AGAIN], max_tokens=1)
    told = await ask(http, "/v1/messages", messages=[USER], max_tokens=1)
    for turn in (told, {"role": told["role"], "content": told["content"]}):
        await ask(http, "/v1/messages", messages=[USER, turn, AGAIN], max_tokens=1)
    told = await ask(http, "/v1/responses", input="hi", max_output_tokens=1)
    await ask(http, "/v1/responses", input=[USER, *told["output"], AGAIN], max_output_tokens=1)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "a", "reasoning_content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": []},
        {"role": "assistant"},
    ],
)
def test_message_without_content_says_nothing(message: dict[str, Any]) -> None:
    _first, said = read_messages([USER, message])
    assert (said.content, list(said.tool_calls)) == ("", [])


@pytest.mark.parametrize("content", [None, [], ""])
def test_tool_that_returned_nothing_has_an_empty_result(content: Any) -> None:
    (chat,) = read_messages([{"role": "tool", "tool_call_id": "c1", "content": content}])
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    (turn,) = read_turns(None, [{"role": "user", "content": [result]}])
    (item,) = read_input([{"type": "function_call_output", "call_id": "c1", "output": content}])
    assert (chat.content, turn["content"], item["content"]) == ("", "", "")


def test_result_that_is_an_image_is_a_text_that_says_so() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    parts = [{"type": "text", "text": "see"}, image]
    (chat,) = read_messages([{"role": "tool", "tool_call_id": "c1", "content": parts}])
    (turn,) = read_turns(
        None, [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": parts}]}]
    )
    output = [{"type": "input_text", "text": "see"}, image]
    (item,) = read_input([{"type": "function_call_output", "call_id": "c1", "output": output}])
    assert chat.content == turn["content"] == item["content"] == "see\n[image: not shown, the model reads text only]"


def test_empty_answers_and_unread_blocks_of_anthropic_are_taken() -> None:
    said = [
        {"type": "thinking", "thinking": "", "signature": "unsigned"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "so", "citations": [{"type": "char_location"}]},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ]
    turns = read_turns([], [USER, {"role": "assistant", "content": []}, {"role": "assistant", "content": said}])
    assert [turn["content"] for turn in turns] == ["hi", "", "so"]
    assert read_turns(None, [{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_items_about_what_ran_elsewhere_are_left_unread() -> None:
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None, "status": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "local_shell_call", "call_id": "l1", "action": {}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": []},
    ]
    assert read_input(items) == [USER, {"role": "assistant", "content": ""}]


def prompt_of(body: dict[str, Any], read: Any) -> str:
    """Return the prompt that a body becomes."""
    (request,) = read(json.dumps(body).encode()).requests
    return LineTemplate().render(read_conversation(request.chat, ChatFormats()), rendered_unix_s=0)


def test_what_the_system_says_first_is_one_message_at_every_door() -> None:
    system = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    expected = "system: one\n\ntwo\nuser: hi\nassistant:"
    assert prompt_of({"messages": [*system, USER]}, read_chat) == expected
    assert prompt_of({"instructions": "one", "input": [system[1], USER]}, read_response) == expected
    messages = [{"role": "system", "content": [{"type": "text", "text": "two"}]}, USER]
    assert prompt_of({"max_tokens": 1, "system": "one", "messages": messages}, read_messages_body) == expected


def test_last_message_is_continued_by_anthropics_door_and_where_asked() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    expected = "user: hi\nassistant: The answer is"
    assert prompt_of({"max_tokens": 1, "messages": [USER, begun]}, read_messages_body) == expected
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of({"messages": [USER, begun], **fields}, read_chat) == expected
    assert prompt_of({"messages": [USER, begun]}, read_chat) == f"{expected}\nassistant:"
