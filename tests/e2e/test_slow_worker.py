"""A process that gets little of its core: its answers move to others, and it is kept out of use."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import throttled
from kvrelay.client import AsyncClient, Token, WorkerView
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import FAKE_POOL, busiest_worker, fake_config, reporting_workers, running_cluster, until

pytestmark = pytest.mark.e2e

NUM_STREAMS, NUM_TOKENS = 3, 400
SAMPLING: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "max_tokens": NUM_TOKENS}


def prompt_of(number: int) -> list[int]:
    return [32 + (number * 11 + i) % 64 for i in range(60)]


async def decode_workers(client: AsyncClient) -> list[WorkerView]:
    return [view for view in await reporting_workers(client) if view.role == "decode"]


async def test_worker_that_stays_slow_gives_its_answers_away_and_is_kept_out(tmp_path: Path) -> None:
    pools = {"prefill": FAKE_POOL, "decode": {**FAKE_POOL, "count": 2, "slow_drain_s": 1.0}}
    async with running_cluster(tmp_path, fake_config(pools=pools, step_ms=10)) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        is_over = asyncio.Event()

        async def ask_on(number: int) -> list[tuple[int, tuple[int, ...]]]:
            """Keep one stream running until the worker is empty: both workers are measured, however the load falls."""
            answers = []
            for seed in itertools.count(number, NUM_STREAMS):
                stream = client.stream(prompt_of(number), seed=seed, **SAMPLING)
                async with stream:
                    async for event in stream:
                        if isinstance(event, Token):
                            begun[number].set()
                    answers.append((seed, (await stream.result()).token_ids))
                if is_over.is_set():
                    break
            return answers

        async def is_kept_out() -> bool:
            views = {view.worker_id: view for view in await decode_workers(client)}
            return views[victim.worker_id].state == "draining" and views[victim.worker_id].slowness > 2

        async def is_empty() -> bool:
            views = {view.worker_id: view.status for view in await decode_workers(client)}
            status = views[victim.worker_id]
            return status is not None and status.load.num_running == 0

        asking = [asyncio.create_task(ask_on(number)) for number in range(NUM_STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        victim = await busiest_worker(client, "decode")
        assert victim.status is not None
        # A fake step is a sleep, which may end while the process stands still: one step a turn of 160 ms, for 10 ms.
        with throttled(victim.status.pid, times=40.0):
            await until(is_kept_out, timeout_s=120, what="the slow worker is kept out")
            await until(is_empty, timeout_s=60, what="its answers have moved")
        is_over.set()
        for number, answers in enumerate(await asyncio.gather(*asking)):
            for seed, answer in answers:
                assert answer == tuple(expected_tokens(make_request(prompt_of(number), seed=seed, **SAMPLING)))
        (other,) = [view for view in await decode_workers(client) if view.worker_id != victim.worker_id]
        assert (other.state, other.slowness) == ("ready", 0)
