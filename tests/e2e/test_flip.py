"""Role flips on a real cluster: workers change their pool under load, and no client notices but by a pause."""

import asyncio
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.e2e.harness import FAKE_POOL, fake_config, pids, running_cluster
from tests.e2e.test_scale import answers, resize

pytestmark = pytest.mark.e2e

SHAPES = ((1, 3), (3, 1), (2, 2))
NUM_TOKENS = 60


async def answers_until(over: asyncio.Event, client: AsyncClient, begun: asyncio.Event) -> list[list[str]]:
    """Ask for all streams, again and again, until it is over; returns the texts of each time."""
    texts = []
    while not over.is_set():
        texts.append([each.text for each in await answers(client, begun, num_tokens=NUM_TOKENS)])
    return texts


async def pools(client: AsyncClient) -> dict[str, set[str]]:
    members: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for view in (await client.status()).workers:
        members[view.role].add(view.worker_id)
    return members


async def test_workers_change_their_pools_under_streams_unnoticed(tmp_path: Path) -> None:
    pool_sections = {
        role: {**FAKE_POOL, "count": 2, "max_running": room} for role, room in (("prefill", 64), ("decode", 48))
    }
    config = fake_config(step_ms=40.0, pools=pool_sections)
    async with running_cluster(tmp_path, config) as client:
        expected = [each.text for each in await answers(client, asyncio.Event(), num_tokens=NUM_TOKENS)]
        before, begun, over = await pids(client), asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(answers_until(over, client, begun))
        await begun.wait()
        for prefill, decode in SHAPES:
            steps = await resize(tmp_path, prefill=prefill, decode=decode)
            assert not [step for step in steps if step.startswith(("starting", "draining"))]
            assert {role: len(names) for role, names in (await pools(client)).items()} == {
                "prefill": prefill,
                "decode": decode,
            }
        over.set()
        done = await running
        status = (await client.status()).router

        assert all(texts == expected for texts in done)
        assert status.num_failed == status.num_replans == 0
        assert await pids(client) == before
        assert await pools(client) == {"prefill": {"prefill-0", "prefill-1"}, "decode": {"decode-0", "decode-1"}}
