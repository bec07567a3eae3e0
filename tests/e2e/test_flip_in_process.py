"""A worker that has changed its pool, as a router sees it: what it cached before is found and used."""

import asyncio
from typing import Any

from kvrelay.v1 import worker_pb2
from tests.e2e.in_process import System, running_system
from tests.served_router import TIMEOUT_S

PROMPT = "what a worker has cached outlives its role. " * 6


async def flip(system: System, worker_id: str, role: Any) -> None:
    """Take a worker out of the membership, give it a role, and have it back."""
    runtime = system.workers[worker_id].runtime
    others = [each for each in system.endpoints if each.worker_id != worker_id]
    await system.use(others)
    await runtime.change_role(role, epoch=runtime.epoch, grace_s=TIMEOUT_S)
    for endpoint in system.endpoints:
        if endpoint.worker_id == worker_id:
            endpoint.role = role


async def until_used(system: System, *worker_ids: str) -> None:
    """Make these the membership and wait until the router uses them."""
    workers = [each for each in system.endpoints if each.worker_id in worker_ids]
    async with asyncio.timeout(TIMEOUT_S):
        while set((await system.use(workers)).ready_worker_ids) != set(worker_ids):
            pass


async def test_router_finds_in_a_flipped_worker_what_it_cached_in_its_old_role() -> None:
    # A policy that goes by the threshold alone: what is cheaper on a busy machine would differ from run to run.
    router = {"policy": "longest_prefix", "local_prefill_max_tokens": 0}
    async with running_system(router=router) as system, system.client() as client:
        first = await client.generate(PROMPT, max_tokens=8, ignore_eos=True, seed=7)
        assert first.plans[0].prefill_worker_id == "p0"
        await flip(system, "p0", worker_pb2.WORKER_ROLE_DECODE)
        await until_used(system, "p0")
        again = await client.generate(PROMPT, max_tokens=8, ignore_eos=True, seed=7)
        assert again.token_ids == first.token_ids
        assert again.plans[0].decode_worker_id == "p0"
        assert again.plans[0].predicted_cached_tokens == again.usage.num_cached_tokens > 200
        await system.until_idle()
