"""Requests that agents sent in a turn with one call of a tool are answered, and each goes on from the one before.

`requests/` has them as they were recorded, one in each line, with other texts and fewer tools.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.chat_template import ChatTemplate, LineTemplate
from router.http.anthropic.calls import read_messages_body
from router.http.calls import Call
from router.http.generation import read_chat
from router.http.responses.call import read_response
from router.reading.conversation import read_conversation
from tests.common.chat.templates import TEMPLATES
from tests.router.fake_worker import DECODE, PREFILL, FakeWorker, Shape
from tests.router.http.clients import HttpCluster, fetch, http_cluster

Request = dict[str, Any]
READERS = {"/v1/messages": read_messages_body, "/v1/responses": read_response, "/v1/chat/completions": read_chat}
CLIENTS = ("claude_code", "codex", "opencode")
SHORT: dict[str, Request] = {
    "claude_code": {"max_tokens": 2},
    "codex": {"max_output_tokens": 2},
    "opencode": {"max_tokens": 2},
}
LEFT_OUT = {"codex": '299 kvrelay "left out: tools[4], tools[8]"'}
"""Warnings: Codex has a namespace of tools and a search of its provider's."""


def recorded(client: str) -> list[Request]:
    lines = (Path(__file__).parent / "requests" / f"{client}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def turns(client: str) -> list[Call]:
    """Return the calls that have tools: the question, and the result of the call."""
    return [
        READERS[each["path"].partition("?")[0]](json.dumps(each["body"]).encode())
        for each in recorded(client)
        if "tools" in (each["body"] or {})
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[HttpCluster]:
    shape = Shape(max_model_len=1 << 16, num_blocks=1 << 14)
    async with http_cluster(FakeWorker("p0", PREFILL, shape), FakeWorker("d0", DECODE, shape)) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("client", CLIENTS)
async def test_recorded_requests_are_answered(http: HttpCluster, client: str) -> None:
    for request in recorded(client):
        body = b"" if request["body"] is None else json.dumps({**request["body"], **SHORT[client]}).encode()
        status, headers, answer = await fetch(http.port, request["method"], request["path"], body, **request["headers"])
        assert status == 200, (request["client"], answer)
        assert b"event: error" not in answer
        assert b"response.failed" not in answer
        if body:
            assert headers.get("warning") == LEFT_OUT.get(client)


@pytest.mark.parametrize("client", CLIENTS)
def test_result_of_a_call_is_asked_about_on_the_prompt_of_the_question(client: str) -> None:
    first, second = [
        LineTemplate().render(read_conversation(call.requests[0].chat), rendered_unix_s=0) for call in turns(client)
    ]
    assert second.startswith(first.removesuffix("assistant:"))
    assert "cch=" not in second


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("template", ["Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "deepseek-ai-DeepSeek-V3.1"])
def test_recorded_conversations_are_rendered_by_models_templates(client: str, template: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "", "eos_token": ""}
    for call in turns(client):
        conversation = read_conversation(call.requests[0].chat)
        assert ChatTemplate(source, special_tokens=tokens).render(conversation, rendered_unix_s=0)
