"""Two routers before the same workers: one dies, and its answers go on through the other; and they share fairly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import Unreachable
from kvrelay.client import (
    AsyncClient,
    AsyncGenerationStream,
    Generation,
    MessageDelta,
    PlanChosen,
    PromptLogprobs,
    Token,
    TokenRun,
)
from kvrelay.v1 import router_admin_pb2
from tests.e2e.in_process import System, another_router, running_system
from tests.e2e.test_direct import LOCAL, PROMPT, REMOTE, VARIANTS
from tests.e2e.test_tools import ARGUMENTS_AT, OPTIONS, TURNS, WEATHER
from tests.served_router import TIMEOUT_S

SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
ENGINE: dict[str, Any] = {"num_blocks": 512, "step_s": 0.002}


@asynccontextmanager
async def two_routers(
    *, router: dict[str, Any] = REMOTE, num_decode: int = 1, **fake: Any
) -> AsyncIterator[tuple[System, System]]:
    async with (
        running_system(num_decode=num_decode, router=router, **(ENGINE | fake)) as first,
        another_router(first, router=router) as second,
    ):
        yield first, second


async def until_token(stream: AsyncGenerationStream, index: int) -> None:
    async for event in stream:
        match event:
            case Token(token_index=at) | TokenRun(first_token_index=at) if at >= index:
                return


@pytest.mark.parametrize("direct", [False, True], ids=["routed", "direct"])
@pytest.mark.parametrize("router", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_router_dies_midstream_then_the_other_one_finishes_the_same_answers(
    router: dict[str, Any], direct: bool
) -> None:
    asked = [([number, *PROMPT], SAMPLING | variant) for number, variant in enumerate((*VARIANTS, PENALTIES))]
    async with two_routers(router=router) as (first, second):
        async with AsyncClient([first.address, second.address], timeout_s=60, direct=direct) as client:
            first.pace.slow_down(at=20)  # on a busy machine the first get there before the last have begun
            streams = [client.stream(prompt, **sampling) for prompt, sampling in asked]
            await asyncio.gather(*(until_token(stream, 10) for stream in streams))
            await first.kill_router()
            first.pace.hurry()
            answers = [await stream.result() for stream in streams]
            assert client.address == second.address
        async with second.client() as client:
            for got, (prompt, sampling) in zip(answers, asked, strict=True):
                expected = await client.generate(prompt, **(sampling | {"seed": got.seed}))
                assert got.samples == expected.samples, sampling
                assert got.prompt_logprobs == expected.prompt_logprobs
                assert got.usage.num_output_tokens == expected.usage.num_output_tokens
                assert got.usage.num_prompt_tokens == len(prompt) >= got.usage.num_cached_tokens
                assert len(got.plans) >= 2
        await second.until_idle()


async def test_stop_string_that_begins_before_the_death_and_ends_after_it_stops() -> None:
    async with two_routers() as (first, second):
        async with second.client() as client:
            whole = (await client.generate(PROMPT, **SAMPLING, seed=5)).samples[0]
        # From the last token that certainly arrived to one that certainly had not.
        cut = next(at for at in range(20, 50) if "".join(whole.text[at : at + 2]).isprintable())
        stop = whole.text[cut : cut + 12]
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            first.pace.slow_down(at=30)
            stream = client.stream(PROMPT, **SAMPLING, seed=5, stop=[stop])
            await until_token(stream, 20)
            await first.kill_router()
            first.pace.hurry()
            got = await stream.result()
        assert got.text == whole.text[: whole.text.index(stop)]
        assert got.samples[0].finish_reason == "stop"


async def test_events_come_once_and_in_order_over_the_death() -> None:
    async with (
        two_routers() as (first, second),
        AsyncClient([first.address, second.address], timeout_s=60) as client,
    ):
        events = []
        first.pace.slow_down(at=30)
        async for event in client.stream(PROMPT, **SAMPLING, prompt_logprobs=0):
            events.append(event)
            if isinstance(event, Token) and event.token_index == 20:
                await first.kill_router()
                first.pace.hurry()
        assert [event.token_index for event in events if isinstance(event, Token)] == list(range(60))
        assert sum(isinstance(event, PromptLogprobs) for event in events) == 1
        assert sum(isinstance(event, PlanChosen) for event in events) == 2


async def test_call_keeps_its_arguments_over_the_death() -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, **OPTIONS}
    async with two_routers() as (first, second):
        async with second.client() as client:
            expected = await client.chat(TURNS, **asked)
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            first.pace.slow_down(at=ARGUMENTS_AT)
            stream = client.stream_chat(TURNS, **asked)
            async for event in stream:
                if isinstance(event, MessageDelta) and any(call.arguments for call in event.tool_calls):
                    break
            await first.kill_router()
            first.pace.hurry()
            got = await stream.result()
        assert (got.message, len(got.plans)) == (expected.message, 2)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_router_dies_then_its_requests_hold_nothing_at_either_pool(phase: str) -> None:
    step_s = 0.05 if phase == "prefill" else 0.005
    async with two_routers(step_s=step_s) as (first, second), first.client() as client:
        prompt = list(range(1, 200)) if phase == "prefill" else PROMPT
        streams = [client.stream([100 + number, *prompt], **(SAMPLING | {"max_tokens": 300})) for number in range(4)]
        for stream in streams:
            if phase == "decode":
                await until_token(stream, 5)
            else:
                while not isinstance(await anext(stream), PlanChosen):
                    pass
        await first.kill_router()
        await second.until_idle()
        for stream in streams:
            await stream.aclose()


async def test_router_told_to_leave_ends_what_it_has_and_may_come_back() -> None:
    async with (
        two_routers(step_s=0.01) as (first, second),
        first.client() as only,
        AsyncClient([first.address, second.address], timeout_s=60) as client,
    ):
        first.pace.slow_down(at=200)
        stream = client.stream(PROMPT, **(SAMPLING | {"max_tokens": 300}))
        await until_token(stream, 5)
        leave = router_admin_pb2.SetWorkersRequest(workers=first.endpoints, leaving=True)
        assert (await first.admin.SetWorkers(leave)).num_requests >= 1

        await client.generate(PROMPT, **(SAMPLING | {"max_tokens": 4}))
        assert client.address == second.address
        with pytest.raises(Unreachable, match="this router is stopping"):
            await only.generate(PROMPT, **SAMPLING)

        first.pace.hurry()
        got = await stream.result()
        assert (len(got.plans), got.usage.num_output_tokens) == (1, 300)
        await first.until_idle()
        assert (await first.admin.SetWorkers(leave)).num_requests == 0

        await first.admin.SetWorkers(router_admin_pb2.SetWorkersRequest(workers=first.endpoints))
        assert (await only.generate(PROMPT, **(SAMPLING | {"max_tokens": 4}))).usage.num_output_tokens == 4


async def test_two_routers_under_load_serve_everybody_and_neither_starves() -> None:
    """Room for a few answers at a time and two dozen asked for: all come, and each router gets room all the while."""
    num_each = 12
    async with two_routers(num_blocks=160) as (first, second):
        finished: list[int] = []

        async def ask(system_index: int, client: AsyncClient, number: int) -> Generation:
            answer = await client.generate([system_index, number, *PROMPT], **(SAMPLING | {"seed": 1}))
            finished.append(system_index)
            return answer

        async with first.client() as one, second.client() as other, asyncio.timeout(TIMEOUT_S):
            answers = await asyncio.gather(
                *(ask(index, (one, other)[index], number) for number in range(num_each) for index in range(2))
            )
            routers = [(await client.status()).router for client in (one, other)]
        assert all(len(answer.samples[0].token_ids) == 60 for answer in answers)
        half = finished[:num_each]
        assert {0, 1} <= set(half), "one router would wait until the other has all that it asked for"
        assert [(router.num_completed, router.num_failed) for router in routers] == [(num_each, 0)] * 2
        await first.until_idle()
        await second.until_idle()
