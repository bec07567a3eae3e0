"""A prefill worker goes: what its chats had in its cache is found on those that stay."""

import asyncio
from typing import Any

from cluster.processes.evacuation import Evacuation
from kvrelay.client import AsyncClient
from tests.cluster.test_evacuation import GRACE_S, peer
from tests.e2e.in_process import System, running_system
from tests.served_router import TIMEOUT_S
from tests.trust import CONTROLLER

NUM_CHATS = 12
SYSTEM_PROMPT = "You are the keeper of a lighthouse, and you answer in short sentences. "


async def hit_rate(client: AsyncClient) -> float:
    """Return the share of the chats' prompt tokens that were found in a cache."""
    num_cached = num_all = 0
    for number in range(NUM_CHATS):
        prompt = SYSTEM_PROMPT + f"ship number {number} passes by night; " * 5
        answer = await client.generate(prompt, max_tokens=2, ignore_eos=True)
        num_cached += answer.usage.num_cached_tokens
        num_all += answer.usage.num_prompt_tokens
    return num_cached / num_all


def num_cached(system: System) -> int:
    """Return how many blocks the router knows on the workers that stay; their reports come with their events."""
    members = system.router.fleet.members
    return sum(member.report.num_cached_blocks for member in members if member.endpoint.worker_id in ("p1", "p2"))


async def leave(system: System, worker_id: str) -> None:
    """Take a worker out of the membership, and end it."""
    system.endpoints[:] = [each for each in system.endpoints if each.worker_id != worker_id]
    await system.drain()
    await system.workers[worker_id].stop(0)


async def test_hit_rate_barely_moves_when_a_worker_that_goes_was_evacuated() -> None:
    # This policy has nothing pulled from decode workers: only prefill workers' caches count.
    router = {"policy": "longest_prefix", "local_prefill_max_tokens": 0}
    shape: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 512}
    async with running_system(num_prefill=3, router=router, **shape) as system, system.client() as client:
        await hit_rate(client)
        before = await hit_rate(client)
        leaving, *staying = (peer(system.workers[name]) for name in ("p0", "p1", "p2"))
        num_known = num_cached(system)
        moved = await Evacuation(CONTROLLER).evacuate(leaving, staying, grace_s=GRACE_S)
        assert moved > 0
        async with asyncio.timeout(TIMEOUT_S):
            while num_cached(system) < num_known + moved:
                await client.status()
        await leave(system, "p0")
        after = await hit_rate(client)
        await leave(system, "p1")
        without = await hit_rate(client)

        assert before > 0.9
        assert after > before - 0.05
        assert without < after - 0.2, "the cluster would not need it"
