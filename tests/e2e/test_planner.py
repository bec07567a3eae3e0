"""Pools that follow their load: a cluster that grows when requests come, shrinks when they end, and loses none."""

import asyncio
from pathlib import Path

import pytest

from cluster.control import read_plan
from kvrelay.client import AsyncClient
from tests.e2e.harness import fake_config, running_cluster, until

pytestmark = pytest.mark.e2e

TIMEOUT_S = 120.0
# A prompt of 1024 tokens is four steps of 25 ms: one worker carries less than ten a second.
PROMPT_TOKENS = 1024
NUM_CALLERS = 12


async def call_again_and_again(client: AsyncClient, number: int, stopping: asyncio.Event) -> int:
    """Returns how many answers came; raises when one did not."""
    num_answers = 0
    while not stopping.is_set():
        prompt = [(number * 7919 + num_answers * 104_729 + position) % 250 for position in range(PROMPT_TOKENS)]
        answer = await client.generate(prompt, max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        num_answers += 1
    return num_answers


async def sizes(client: AsyncClient) -> tuple[int, int]:
    roles = [view.role for view in (await client.status()).workers]
    return roles.count("prefill"), roles.count("decode")


async def test_pools_follow_their_load_and_no_request_fails(tmp_path: Path) -> None:
    planner = {"mode": "act", "interval_s": 0.5, "window_s": 2, "stable_s": 1, "cooldown_s": 0.5, "max_workers": 4}
    config = fake_config(step_ms=25.0, planner=planner, slo={"ttft_s": 0.3, "tpot_s": 0.2})
    async with running_cluster(tmp_path, config) as client:
        stopping = asyncio.Event()
        callers = [asyncio.create_task(call_again_and_again(client, number, stopping)) for number in range(NUM_CALLERS)]

        async def has_grown() -> bool:
            return (await sizes(client))[0] > 1

        async def has_shrunk() -> bool:
            latest = (await asyncio.to_thread(read_plan, tmp_path / "run")).latest
            return (latest.prefill.present, latest.decode.present) == (1, 1) == await sizes(client)

        await until(has_grown, timeout_s=TIMEOUT_S, what="the prefill pool has grown")
        stopping.set()
        assert all(await asyncio.gather(*callers))
        await until(has_shrunk, timeout_s=TIMEOUT_S, what="both pools are as small as may be")
        status = (await client.status()).router
        told = await asyncio.to_thread(read_plan, tmp_path / "run")

        assert status.num_failed == status.num_replans == 0
        assert told.mode == "act"
        assert any(change.prefill.wanted > change.prefill.present for change in told.changes)
        assert any(change.outcome.startswith("done") for change in told.changes)
        assert "requests/s come" in told.latest.reason
