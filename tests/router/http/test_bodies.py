"""Bodies: whose they are and what that tenant may comes first; large ones are read like small ones; none stays."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from kvrelay.v1 import inference_pb2 as pb
from router.doors.readers import INLINE_BYTES, INLINE_MESSAGE_BYTES
from tests.router.fake_worker import TIMEOUT_S, answer, pair
from tests.router.fakes import prompt_of
from tests.router.http.clients import COMPLETIONS, HttpCluster, body_of, fetch, head, http_cluster, sent
from tests.router.test_tenants import KEYS, serving

KEY = f"Bearer {KEYS['a']}"
LARGE = {"metadata": {"note": "x" * INLINE_BYTES}}
"""A field without an effect that makes a body too large to be read on the event loop."""


@pytest.mark.parametrize("prompt", [prompt_of(10), [prompt_of(10), prompt_of(9)]], ids=["one", "two"])
async def test_large_body_is_answered_like_a_small_one(http: HttpCluster, prompt: list[int]) -> None:
    small, large = body_of(prompt=prompt, return_token_ids=True), body_of(prompt=prompt, return_token_ids=True, **LARGE)
    answers = [json.loads((await fetch(http.port, "POST", COMPLETIONS, body))[2]) for body in (small, large)]
    first, second = ([choice["token_ids"] for choice in each["choices"]] for each in answers)
    assert first == second
    assert first[0] == answer(prompt_of(10), 6)


@pytest.mark.usefixtures("no_refill")
async def test_tenant_beyond_its_rate_is_refused_before_its_body_comes() -> None:
    async with http_cluster(*pair(), config=serving(http_port=0, a={"requests_per_min": 1})) as http:
        assert (await fetch(http.port, "POST", COMPLETIONS, body_of(), authorization=KEY))[0] == 200
        unsent = head("POST", COMPLETIONS, 1 << 20, authorization=KEY)
        async with asyncio.timeout(TIMEOUT_S), sent(http, unsent) as reader:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429")


@pytest.mark.usefixtures("no_refill")
async def test_client_that_asks_first_is_told_to_send_only_a_body_that_is_read() -> None:
    async with http_cluster(*pair(), config=serving(http_port=0, a={"requests_per_min": 1})) as http:
        body, asks = body_of(), {"authorization": KEY, "expect": "100-continue"}
        status, _headers, rest = await fetch(http.port, "POST", COMPLETIONS, body, **asks)
        assert status == 100
        assert rest.startswith(b"HTTP/1.1 200")
        assert (await fetch(http.port, "POST", COMPLETIONS, body, **asks))[0] == 429


@pytest.mark.usefixtures("no_refill")
@pytest.mark.parametrize("extra", [{}, LARGE], ids=["small", "large"])
async def test_body_that_is_no_request_counts_against_the_rate(extra: dict[str, object]) -> None:
    async with http_cluster(*pair(), config=serving(http_port=0, a={"requests_per_min": 1})) as http:
        bodies = (body_of(stop=3, **extra), body_of())
        answers = [await fetch(http.port, "POST", COMPLETIONS, body, authorization=KEY) for body in bodies]
        assert [status for status, *_rest in answers] == [400, 429]


async def test_bytes_of_bodies_and_of_messages_are_given_back_however_a_request_ends() -> None:
    async with http_cluster(*pair(), config=serving(http_port=0)) as http:
        unfinished = head("POST", COMPLETIONS, 1 << 20, authorization=KEY) + b'{"prompt": "'
        async with sent(http, unfinished):
            for body in (body_of(), body_of(**LARGE), body_of(stop=3, **LARGE), b"{"):
                await fetch(http.port, "POST", COMPLETIONS, body, authorization=KEY)
        await http.cluster.until_idle()
        (usage,) = http.cluster.router.door.parts.admission.tenants
        assert usage.tenant == "a"
        assert (usage.num_arriving_bytes, usage.num_unsent_entries) == (0, 0)
        assert usage.num_output_tokens == 12
        assert usage.router_s > 0


async def test_message_of_very_many_small_ones_is_refused_while_others_are_served(http: HttpCluster) -> None:
    chat = pb.ChatPrompt.DESCRIPTOR.fields_by_name["messages"].number << 3 | 2
    messages = bytes([chat, 0]) * INLINE_MESSAGE_BYTES
    inner = pb.GenerateRequest(chat=pb.ChatPrompt.FromString(messages)).SerializeToString()
    async with grpc.aio.insecure_channel(http.cluster.router.address) as channel:
        generate: Any = channel.unary_stream("/kvrelay.v1.InferenceService/Generate")
        call = generate(inner, timeout=TIMEOUT_S)
        assert (await fetch(http.port, "POST", COMPLETIONS, body_of()))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError, match=r"chat\.messages has") as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
