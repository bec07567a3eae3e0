"""Clients that leave, and a router that stops: nothing is left behind, and every client is told."""

import asyncio
import json

import openai
import pytest

from tests.router.fakes import TIMEOUT_S, answer, prompt_of
from tests.router.http.clients import COMPLETIONS, body_of, fetch, head, held_cluster, http_cluster, pair, sent


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("gate", ["queue", "reserve", "prefill", "first_token", "fetch", "token 1", "token 3"])
async def test_client_that_leaves_frees_everything(gate: str, is_streamed: bool) -> None:
    prefill, decode = pair()
    for worker in (prefill, decode):
        worker.gates.close(gate)
    if gate == "queue":
        decode.report.num_free_blocks, decode.report.num_running = 0, 1
    if gate in ("prefill", "first_token"):
        decode.gates.close("fetch")  # there is nothing to fetch yet
    body = body_of(stream=is_streamed)
    async with http_cluster(prefill, decode) as http:
        async with sent(http, head("POST", COMPLETIONS, len(body)) + body):
            if gate == "queue":
                await http.cluster.until_queued(1)
            else:
                await (prefill if gate in ("prefill", "first_token") else decode).gates.reached(gate)
        status = await http.cluster.until_idle()
        assert (status.num_cancelled, status.num_failed, status.num_completed) == (1, 0, 0)
        assert decode.calls["cancelled"] == decode.calls["started"] == (0 if gate == "queue" else 1)
        await http.until_responses(COMPLETIONS, 499)


async def test_client_that_leaves_before_its_body_is_complete_frees_everything() -> None:
    async with http_cluster(*pair()) as http:
        async with sent(http, head("POST", COMPLETIONS, 100) + b'{"prompt"'):
            async with asyncio.timeout(TIMEOUT_S):
                while not (await http.cluster.status()).router.num_request_tasks:
                    pass
        assert (await http.cluster.until_idle()).num_cancelled == 1


async def test_client_that_leaves_a_call_of_several_prompts_cancels_all() -> None:
    body = body_of(prompt=[prompt_of(5), prompt_of(9)], n=2)
    async with held_cluster("token 1") as (http, decode):
        async with sent(http, head("POST", COMPLETIONS, len(body)) + body):
            async with asyncio.timeout(TIMEOUT_S):
                while decode.calls["started"] < 2:
                    await http.cluster.status()
        assert (await http.cluster.until_idle()).num_cancelled == 2
        assert decode.calls["cancelled"] == 2


async def test_client_that_leaves_having_sent_more_requests_frees_everything() -> None:
    request = head("POST", COMPLETIONS, len(body_of()), connection="keep-alive") + body_of()
    async with held_cluster("token 1") as (http, decode):
        async with sent(http, request * 3):
            await decode.gates.reached("token 1")
        assert (await http.cluster.until_idle()).num_cancelled == 1
        assert decode.calls["started"] == 1


async def test_openai_stream_that_is_closed_in_the_middle_frees_everything() -> None:
    async with held_cluster("token 3") as (http, _):
        stream = await http.chat(max_tokens=6, stream=True)
        async for _chunk in stream:
            break
        await stream.close()
        assert (await http.cluster.until_idle()).num_cancelled == 1


async def test_client_that_does_not_read_delays_no_other() -> None:
    prefill, decode = pair()
    body = body_of(stream=True, max_tokens=100)
    async with http_cluster(prefill, decode) as http, sent(http, head("POST", COMPLETIONS, len(body)) + body):
        reply = await http.complete(prompt=prompt_of(12), return_token_ids=True)
        assert reply.choices[0].token_ids == answer(prompt_of(12), 6)


async def test_stop_lets_a_running_stream_end_and_refuses_new_calls() -> None:
    async with held_cluster("token 3") as (http, decode):
        stream = await http.complete(stream=True, return_token_ids=True)
        ids = [*(await anext(stream)).choices[0].token_ids]
        stopping = asyncio.create_task(http.cluster.router.stop(TIMEOUT_S))
        async with asyncio.timeout(TIMEOUT_S):
            while (await fetch(http.port, "GET", "/health"))[0] != 503:
                pass
        assert (await fetch(http.port, "POST", COMPLETIONS, body_of()))[0] == 503
        decode.gates.open("token 3")
        ids += [token async for chunk in stream for token in chunk.choices[0].token_ids]
        assert ids == answer(prompt_of(10), 6)
        await stopping


async def test_stop_without_grace_ends_a_stream_with_an_error() -> None:
    async with held_cluster("token 3") as (http, _):
        stream = await http.complete(stream=True)
        await anext(stream)
        stopping = asyncio.create_task(http.cluster.router.stop(0))
        with pytest.raises(openai.APIError, match="stopping"):
            async for _chunk in stream:
                pass
        await stopping


async def test_stop_without_grace_refuses_waiting_requests() -> None:
    async with held_cluster("reserve") as (http, decode):
        waiting = asyncio.create_task(fetch(http.port, "POST", COMPLETIONS, body_of()))
        await decode.gates.reached("reserve")
        await http.cluster.router.stop(0)
        status, _headers, body = await waiting
        assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")
