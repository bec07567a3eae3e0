"""Processes that do not die but stop, hang, or are ended by a request: answers go on, and the pools heal."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.errors import CrashSuspected
from engine.fake import FAULTS_ENV, FaultToken
from kvrelay.client import AsyncClient, Token
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import (
    FAKE_POOL,
    busiest_worker,
    fake_config,
    generate_all,
    mixed_sampling,
    pids,
    running_cluster,
    until,
    until_idle,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 50.0
"""Deadline of a request; without a watch for silence, its streams would stand still for a minute."""
LENGTH: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}
NUM_STREAMS, NUM_TOKENS = 4, 200
"""Answers whose worker is stopped in their middle, and tokens of each: enough for it to last for seconds."""


def prompt_of(number: int) -> list[int]:
    return [32 + (number * 11 + i) % 64 for i in range(60)]


def oracle(number: int, **sampling: Any) -> tuple[int, ...]:
    return tuple(expected_tokens(make_request(prompt_of(number), **sampling)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    pools = {pool: {**FAKE_POOL, "count": 2} for pool in ("prefill", "decode")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTS_ENV, "1")
        router = {"port": 0, "local_prefill_max_tokens": 32, "silence_s": 1.0}
        config = fake_config(pools=pools, step_ms=20, router=router)
        async with running_cluster(tmp_path_factory.mktemp("gray"), config) as client:
            yield client


async def warm_up(client: AsyncClient) -> None:
    """Let the prefill workers measure their steps: only then is a long one overdue after a second."""
    first = 1000

    async def is_measured() -> bool:
        nonlocal first
        await generate_all(client, [prompt_of(first + number) for number in range(16)], max_tokens=2)
        first += 16
        views = [view for view in (await client.status()).workers if view.role == "prefill"]
        return all(view.status is not None and view.status.num_computed_tokens > 4000 for view in views)

    await until(is_measured, timeout_s=120, what="the prefill workers have measured their steps")


async def until_whole(client: AsyncClient) -> None:
    """Wait until all four workers are ready."""

    async def is_whole() -> bool:
        return [view.state for view in (await client.status()).workers] == ["ready"] * 4

    await until(is_whole, timeout_s=120, what="four workers are ready")


async def test_answers_of_a_stopped_worker_go_on_elsewhere_and_it_is_replaced(client: AsyncClient) -> None:
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def ask(number: int) -> tuple[int, ...]:
        tokens: list[int] = []
        stream = client.stream(prompt_of(number), timeout_s=TIMEOUT_S, **mixed_sampling(number, max_tokens=NUM_TOKENS))
        async for event in stream:
            if isinstance(event, Token):
                tokens.append(event.token_id)
                begun[number].set()
        return tuple(tokens)

    asking = [asyncio.create_task(ask(number)) for number in range(NUM_STREAMS)]
    await asyncio.gather(*(event.wait() for event in begun))
    victim = (await busiest_worker(client, "decode")).status
    assert victim is not None
    os.kill(victim.pid, signal.SIGSTOP)
    for number, answer in enumerate(await asyncio.gather(*asking)):
        assert answer == oracle(number, **mixed_sampling(number, max_tokens=NUM_TOKENS))
    assert (await client.status()).router.num_replans > 0
    await until_whole(client)
    assert victim.pid not in (await pids(client)).values()
    await until_idle(client)


async def test_prompt_that_crashes_its_workers_is_refused_and_no_other_is_lost(client: AsyncClient) -> None:
    async def poison() -> None:
        with pytest.raises(CrashSuspected):
            await client.generate([*prompt_of(50), FaultToken.CRASH], max_tokens=5)

    others = [client.generate(prompt_of(number), max_tokens=60, seed=number, **LENGTH) for number in range(NUM_STREAMS)]
    answers = await asyncio.gather(*others, poison())
    for number, answer in enumerate(answers[:NUM_STREAMS]):
        assert answer is not None
        assert answer.token_ids == oracle(number, max_tokens=60, seed=number, **LENGTH)
    await until_whole(client)
    await until_idle(client)


async def test_engine_that_hangs_gets_nothing_more_and_ends_itself(client: AsyncClient) -> None:
    await warm_up(client)
    before = set((await pids(client)).values())
    poison = asyncio.create_task(client.generate([*prompt_of(60), FaultToken.HANG], max_tokens=5))

    async def is_noticed() -> bool:
        # A worker may be replaced between two looks.
        views = (await client.status()).workers
        return any(view.state == "lost" or view.status is None or view.status.pid not in before for view in views)

    await until(is_noticed, timeout_s=TIMEOUT_S, what="a hung worker is noticed")
    poison.cancel()  # the worker that replaces this one would hang in it for as long as an unmeasured step may take
    prompts = [prompt_of(number) for number in range(4)]
    for answer in await generate_all(client, prompts, max_tokens=20, timeout_s=TIMEOUT_S, **LENGTH):
        assert len(answer.token_ids) == 20

    async def is_replaced() -> bool:
        views = (await client.status()).workers
        return any(view.status is not None and view.status.pid not in before for view in views)

    await until(is_replaced, timeout_s=120, what="a hung worker has ended itself")
    await until_whole(client)
