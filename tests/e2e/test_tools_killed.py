"""kill -9 of a decode worker and of a router under a call of a tool: the same call comes out."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation, MessageDelta
from tests.e2e.harness import FAKE_POOL, fake_config, kill_worker, running_cluster, until_idle
from tests.e2e.test_router_death import router

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
                    "minItems": 60,
                    "maxItems": 99,
                }
            },
            "required": ["steps"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {"tools": [PLAN], "tool_choice": "required", "parallel_tool_calls": False}


async def call(client: AsyncClient, seed: int, begun: asyncio.Event) -> Generation:
    turns = [{"role": "user", "content": f"What is next, {seed}?"}]
    async with client.stream_chat(turns, max_tokens=900, seed=seed, **ASKED) as stream:
        async for event in stream:
            if isinstance(event, MessageDelta) and any(len(each.arguments) > 0 for each in event.tool_calls):
                begun.set()
        return await stream.result()


async def test_call_keeps_its_arguments_after_its_worker_and_router_were_killed(tmp_path: Path) -> None:
    pools = {"prefill": FAKE_POOL, "decode": {**FAKE_POOL, "count": 2}}
    config = fake_config(pools=pools, step_ms=20.0)
    config["router"] |= {"count": 2}
    async with running_cluster(tmp_path, config) as client:
        expected = await asyncio.gather(*(call(client, seed, asyncio.Event()) for seed in range(3)))
        begun = [asyncio.Event() for _ in expected]
        async with AsyncClient(client.addresses, timeout_s=120) as other:
            calling = [asyncio.create_task(call(other, seed, begun[seed])) for seed in range(3)]
            await asyncio.gather(*(event.wait() for event in begun))
            await kill_worker(client, "decode")
            identity = router(tmp_path, 0).identity
            assert identity is not None
            identity.signal(signal.SIGKILL)
            done = await asyncio.gather(*calling)
        for before, after in zip(expected, done, strict=True):
            assert before.message is not None
            assert after.message == before.message
            (made,) = before.message.tool_calls
            assert len(json.loads(made.arguments)["steps"]) >= 60
        assert max(len(each.plans) for each in done) > 1, "a kill must have hit a call"
        async with AsyncClient(client.addresses[1], timeout_s=60) as left:
            await until_idle(left)
