"""Processes that are killed, stop, hang, or are ended by a request: answers go on, and the pools heal."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.errors import CrashSuspected
from engine.fake import FAULTS_ENV, FaultToken
from kvrelay.client import AsyncClient, Embedding
from tests.builders import expected_tokens, make_request
from tests.e2e import test_embeddings as embeddings
from tests.e2e.harness import (
    FAKE_POOL,
    busiest_worker,
    fake_config,
    pids,
    running_cluster,
    until,
    until_idle,
)
from tests.e2e.streams import answers, running_streams
from tests.engine.beam_oracle import expected_beams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 50.0
"""Time for all answers; without a watch for silence, streams would stand still for a minute."""
NUM_TOKENS = 200
"""Tokens of answers whose worker is hit in their middle: enough for them to last for seconds."""


def prompt_of(number: int) -> list[int]:
    return [32 + (number * 11 + i) % 64 for i in range(60)]


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
        prompts = (prompt_of(number) for number in range(first, first + 16))
        await asyncio.gather(*(client.generate(prompt, max_tokens=2) for prompt in prompts))
        first += 16
        views = [view for view in (await client.status()).workers if view.role == "prefill"]
        return all(view.status is not None and view.status.num_computed_tokens > 4000 for view in views)

    await until(is_measured, timeout_s=120, what="the prefill workers have measured their steps")


async def until_whole(client: AsyncClient) -> None:
    """Wait until all four workers are ready."""

    async def is_whole() -> bool:
        return [view.state for view in (await client.status()).workers] == ["ready"] * 4

    await until(is_whole, timeout_s=120, what="four workers are ready")


async def test_workers_of_both_pools_killed_cost_no_answer_and_no_embedding(
    client: AsyncClient,
) -> None:
    samples: dict[str, Any] = {"temperature": 1.0, "seed": 9, "n": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    beams: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    texts = ["The rivers of the north. " * 40 + str(number) for number in range(24)]
    was_hit = asyncio.Event()

    async def embed_on(text: str) -> list[Embedding]:
        """Embed a text again and again, however fast the host, until a worker has been killed meanwhile.

        Each text goes on by itself: if all waited for the last of them, a worker might have nothing when it is killed.
        """
        vectors: list[Embedding] = []
        while not was_hit.is_set():
            vectors.append(await client.embed(text))
        return vectors

    embedding = asyncio.gather(*(embed_on(text) for text in texts))
    killed = [await kill_busiest(client, "prefill")]
    was_hit.set()
    async with running_streams(client, num_tokens=NUM_TOKENS) as running:
        others = asyncio.gather(*(client.generate(prompt_of(0), **each) for each in (samples, beams)))
        killed.append(await kill_busiest(client, "decode"))
        sampled, searched = await others
    request = make_request(prompt_of(0), **samples)
    assert [each.token_ids for each in sampled.samples] == [
        tuple(expected_tokens(request, sample=index)) for index in range(4)
    ]
    assert [list(each.token_ids) for each in searched.samples] == expected_beams(make_request(prompt_of(0), **beams))
    vectors = dict(zip(texts, await embedding, strict=True))
    for text in texts:
        expected = embeddings.expected(text)
        assert all(list(each.vector) == expected for each in vectors[text])
    assert max(each.num_attempts for text in texts for each in vectors[text]) > 1
    assert max(len(each.plans) for each in (sampled, searched, *(task.result() for task in running))) > 1
    await until_whole(client)
    assert not set(killed) & set((await pids(client)).values())
    await until_idle(client)


async def kill_busiest(client: AsyncClient, role: str) -> int:
    """Kill -9 the worker of a pool that runs most and return its pid."""
    victim = (await busiest_worker(client, role)).status
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    return victim.pid


async def test_answers_of_a_stopped_worker_go_on_elsewhere_and_it_is_replaced(client: AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT_S), running_streams(client, num_tokens=NUM_TOKENS):
        victim = (await busiest_worker(client, "decode")).status
        assert victim is not None
        os.kill(victim.pid, signal.SIGSTOP)
    assert (await client.status()).router.num_replans > 0
    await until_whole(client)
    assert victim.pid not in (await pids(client)).values()
    await until_idle(client)


async def test_prompt_that_crashes_its_workers_is_refused_and_no_other_is_lost(client: AsyncClient) -> None:
    async def poison() -> None:
        with pytest.raises(CrashSuspected):
            await client.generate([*prompt_of(50), FaultToken.CRASH], max_tokens=5)

    await asyncio.gather(answers(client, num_tokens=60), poison())
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
    async with asyncio.timeout(TIMEOUT_S):
        await answers(client, num_tokens=20)

    async def is_replaced() -> bool:
        views = (await client.status()).workers
        return any(view.status is not None and view.status.pid not in before for view in views)

    await until(is_replaced, timeout_s=120, what="a hung worker has ended itself")
    await until_whole(client)
