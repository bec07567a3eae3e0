"""kill -9 of one of two routers under streams: a pause for half of them, and the same texts and calls for all."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from cluster.lifecycle import ClusterInfo
from cluster.processes.state import ProcessState, StateFile
from kvrelay.client import AsyncClient, Generation, MessageDelta
from tests.e2e.harness import (
    FAKE_POOL,
    fake_config,
    kill_worker,
    reporting_workers,
    standing_cluster,
    until,
    until_idle,
)
from tests.e2e.streams import answer, running_streams

pytestmark = pytest.mark.e2e

PLAN: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "type": "object",
            "properties": {
                "steps": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 99},
                    "minItems": 40,
                    "maxItems": 50,
                }
            },
            "required": ["steps"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {"tools": [PLAN], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """A cluster with two routers, which the tests use in their order."""
    pools = {"prefill": FAKE_POOL, "decode": {**FAKE_POOL, "count": 2}}
    config = fake_config(step_ms=60.0, pools=pools)
    config["router"] |= {"count": 2}
    with standing_cluster(tmp_path_factory.mktemp("two-routers"), config) as info:
        yield info


def router(info: ClusterInfo, index: int) -> ProcessState:
    state = StateFile(info.run_dir).read()
    assert state is not None
    return next(process for process in state.processes if process.name == f"router-{index}")


def kill_router(info: ClusterInfo, index: int) -> None:
    identity = router(info, index).identity
    assert identity is not None
    identity.signal(signal.SIGKILL)


async def test_streams_of_a_killed_router_end_with_the_same_texts_and_it_comes_back(info: ClusterInfo) -> None:
    first, second = info.addresses
    async with AsyncClient([first, second], timeout_s=120) as one, AsyncClient([second, first], timeout_s=120) as other:
        before = router(info, 0).identity
        async with running_streams(one, other, num_tokens=80) as running:
            kill_router(info, 0)
        assert one.address == other.address == second
        done = [task.result() for task in running]

        assert max(len(each.plans) for each in done[::2]) == 2  # those of the one that was killed
        assert {len(each.plans) for each in done[1::2]} == {1}
        assert {each.usage.num_output_tokens for each in done} == {80}

        async def serves_again() -> bool:
            return router(info, 0).address != "" and router(info, 0).identity != before

        await until(serves_again, timeout_s=60, what="the killed router is back")
        http = AsyncOpenAI(base_url=f"http://{info.http_addresses[0]}/v1", api_key="sk-any", max_retries=20)
        async with AsyncClient(first, timeout_s=60, max_attempts=100) as again, http:
            await answer(again, 0, num_tokens=4)
            workers = {view.worker_id for view in (await again.status()).workers}
            assert workers <= {"prefill-0", "decode-0", "decode-1"}
            options: dict[str, Any] = {"prompt": "Where it was.", "max_tokens": 8, "temperature": 1.0, "seed": 11}
            reply = await http.completions.create(model="fake", **options)
            assert reply.choices[0].text == (await again.generate(**options)).text
        status = (await other.status()).router
        assert status.num_failed == status.num_replans == 0
        held = [view.status.num_leases for view in await reporting_workers(other) if view.status is not None]
        assert held == [0, 0, 0]


async def call(client: AsyncClient, seed: int, begun: asyncio.Event) -> Generation:
    turns = [{"role": "user", "content": f"What is next, {seed}?"}]
    async with client.stream_chat(turns, max_tokens=400, seed=seed, **ASKED) as stream:
        async for event in stream:
            if isinstance(event, MessageDelta) and any(len(each.arguments) > 0 for each in event.tool_calls):
                begun.set()
        return await stream.result()


async def test_call_keeps_its_arguments_after_its_worker_and_router_were_killed(info: ClusterInfo) -> None:
    async with AsyncClient(info.addresses[1], timeout_s=120) as left:
        expected = await asyncio.gather(*(call(left, seed, asyncio.Event()) for seed in range(3)))
        begun = [asyncio.Event() for _ in expected]
        async with AsyncClient(info.addresses, timeout_s=120) as other:
            calling = [asyncio.create_task(call(other, seed, begun[seed])) for seed in range(3)]
            await asyncio.gather(*(event.wait() for event in begun))
            await kill_worker(left, "decode")
            kill_router(info, 0)
            done = await asyncio.gather(*calling)
        for before, after in zip(expected, done, strict=True):
            assert before.message is not None
            assert after.message == before.message
            (made,) = before.message.tool_calls
            assert len(json.loads(made.arguments)["steps"]) >= 40
        assert max(len(each.plans) for each in done) > 1, "a kill must have hit a call"
        await until_idle(left)
