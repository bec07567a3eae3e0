"""Embeddings by real workers: those of the fake engine, whatever runs beside them and whichever worker is lost."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from common.pooling import Pooling
from engine.executor import ScheduledSequence
from engine.fake import FakeExecutor, FakeStep
from kvrelay.client import AsyncClient, Client, Embedding, InvalidRequest
from tests.builders import BLOCK_SIZE, expected_embedding, expected_tokens, make_request
from tests.e2e.in_process import running_system
from tests.served_router import TIMEOUT_S

POOLINGS = ("last", "mean")


def expected(prompt: str, pooling: str = "last") -> Any:
    """Return the normalized embedding of a text, computed without workers."""
    vector = expected_embedding(list(prompt.encode()), Pooling(pooling)).astype(np.float64)
    return pytest.approx((vector / np.linalg.norm(vector)).tolist(), abs=1e-6)


def prompts(count: int) -> list[str]:
    return [f"{'The rivers of the north. ' * (number % 5)}Number {number}" for number in range(count)]


async def embed_all(client: AsyncClient, texts: list[str], pooling: Any) -> list[Embedding]:
    return await asyncio.gather(*(client.embed(text, pooling=pooling) for text in texts))


async def test_embeddings_beside_answers_are_those_of_a_lone_prompt() -> None:
    async with running_system(num_prefill=2) as system, system.client() as client:
        texts = prompts(12)
        embedding = [embed_all(client, texts, pooling) for pooling in POOLINGS]
        answers = [client.generate(list(range(40, 60 + n)), max_tokens=12, temperature=0) for n in range(6)]
        embeddings, generations = await asyncio.gather(asyncio.gather(*embedding), asyncio.gather(*answers))
        for pooling, found in zip(POOLINGS, embeddings, strict=True):
            assert [list(each.vector) for each in found] == [expected(text, pooling) for text in texts]
        for number, generation in enumerate(generations):
            request = make_request(range(40, 60 + number), max_tokens=12)
            assert list(generation.token_ids) == expected_tokens(request)
        await system.until_idle()


class HeldExecutor(FakeExecutor):
    """A fake engine whose steps start when the test lets them."""

    def __init__(self) -> None:
        super().__init__(num_blocks=128, block_size=BLOCK_SIZE, max_model_len=1024)
        self.released = threading.Event()
        self.num_prefill_tokens: list[int] = []

    def launch(self, batch: Sequence[ScheduledSequence]) -> FakeStep:
        self.released.wait(TIMEOUT_S)
        self.num_prefill_tokens.append(sum(item.num_new_tokens for item in batch))
        return super().launch(batch)


async def test_step_of_a_prefill_worker_computes_many_embeddings_at_once() -> None:
    executor = HeldExecutor()
    starting = running_system(num_decode=0, max_step_tokens=1024, load=lambda: executor)
    async with starting as system, system.client() as client:
        running = asyncio.create_task(embed_all(client, ["x" * 20 + str(number) for number in range(30)], "mean"))
        while system.workers["p0"].runtime.num_request_tasks < 10:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)
        executor.released.set()
        await running
        assert max(executor.num_prefill_tokens) > 2 * 22
        await system.until_idle()


async def test_cached_prefix_saves_the_last_tokens_embedding_most_of_its_work() -> None:
    text = "A template that every prompt begins with, word by word. " * 3
    async with running_system(num_decode=0) as system, system.client() as client:
        cold, warm = await client.embed(text), await client.embed(text)
        mean = await client.embed(text, pooling="mean")
        assert (cold.usage.num_cached_tokens, mean.usage.num_cached_tokens) == (0, 0)
        assert warm.usage.num_cached_tokens >= len(text) - 4
        assert cold.vector == warm.vector
        assert list(mean.vector) == expected(text, "mean")


async def test_prompt_that_was_embedded_is_cached_for_an_answer() -> None:
    async with running_system() as system, system.client() as client:
        await client.embed(list(range(40, 100)), pooling="mean")
        generation = await client.generate(list(range(40, 100)), max_tokens=4, temperature=0)
        assert generation.usage.num_cached_tokens > 0
        assert list(generation.token_ids) == expected_tokens(make_request(range(40, 100), max_tokens=4))


async def test_prefill_worker_killed_in_the_middle_costs_no_embedding() -> None:
    async with running_system(num_prefill=2, num_decode=0, step_s=0.005) as system, system.client() as client:
        texts = prompts(12)
        system.pace.slow_down(at=0)
        running = asyncio.gather(*(embed_all(client, texts, pooling) for pooling in POOLINGS))
        while not system.workers["p0"].runtime.num_request_tasks:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)
        await system.kill("p0")
        system.pace.hurry()
        done = await running
        for pooling, embeddings in zip(POOLINGS, done, strict=True):
            assert [list(each.vector) for each in embeddings] == [expected(text, pooling) for text in texts]
        moved = [each for embeddings in done for each in embeddings if each.num_attempts > 1]
        assert {(each.num_attempts, each.plans[-1].prefill_worker_id) for each in moved} == {(2, "p1")}


async def test_both_doors_and_the_blocking_client_give_one_vector() -> None:
    async with running_system(num_decode=0, router={"http_port": 0}) as system, system.client() as client:
        text = "Tell me about rivers."
        told = await client.embed(text, dimensions=5)
        assert (told.model, len(told.vector), told.plans[0].kind.value) == ("fake", 5, "prefill")
        assert told.timings.ttft_s == told.timings.e2e_s > 0
        with Client(system.address, timeout_s=30) as blocking:
            assert (await asyncio.to_thread(blocking.embed, text, dimensions=5)).vector == told.vector
        base_url = f"http://127.0.0.1:{system.router.http_port}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="sk-any", max_retries=0) as openai:
            variants: tuple[dict[str, Any], ...] = ({}, {"encoding_format": "float"})
            for options in variants:
                reply = await openai.embeddings.create(model="fake", input=text, dimensions=5, **options)
                assert tuple(reply.data[0].embedding) == told.vector


async def test_bad_options_of_the_client_raise_before_anything_is_sent() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="pooling") as caught:
            await client.embed("a", pooling="max")  # type: ignore[arg-type]
        assert caught.value.field == "pooling"
        with pytest.raises(InvalidRequest, match="dimensions"):
            await client.embed("a", dimensions=-1)
        with pytest.raises(TypeError, match="unknown option"):
            await client.embed("a", poling="mean")  # type: ignore[call-arg]
