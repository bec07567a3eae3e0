"""Router, prefill worker and decode worker as real processes around the fake engine, against its page-free oracle."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from common.pooling import Pooling
from kvrelay.client import AsyncClient
from tests.builders import expected_embedding, expected_tokens, make_request
from tests.e2e.harness import (
    fake_config,
    generate_all,
    kill_worker,
    mixed_sampling,
    pids,
    running_cluster,
    until,
    until_idle,
    worker,
)
from tests.e2e.test_chaos import send_chaos
from tests.engine.beam_oracle import expected_beams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

NUM_STREAMS, NUM_TOKENS = 4, 100
"""Streams that something hits, and tokens of each: enough for it to last for seconds."""
LENGTHS = sorted({1, 2, *(16 * k + d for k in (1, 2, 3, 16, 32) for d in (-1, 0, 1)), 700})


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 256 for i in range(length)]


def oracle(prompt: list[int], **sampling: Any) -> tuple[int, ...]:
    return tuple(expected_tokens(make_request(prompt, **sampling)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    # A policy that goes by the threshold alone: what is cheaper on a busy machine would differ from run to run.
    router = {"port": 0, "policy": "longest_prefix", "local_prefill_max_tokens": 32, "queue_timeout_s": 120.0}
    # Steps so long that answers which are looked at and hit in their middle last for seconds.
    async with running_cluster(tmp_path_factory.mktemp("fake"), fake_config(step_ms=40.0, router=router)) as client:
        yield client


async def test_answers_at_every_boundary_equal_oracle_cold_and_cached(client: AsyncClient) -> None:
    prompts = [prompt_of(length, 1) for length in LENGTHS]
    options = [mixed_sampling(number, max_tokens=12) for number in range(len(prompts))]
    for _ in ("cold", "cached"):
        asked = zip(prompts, options, strict=True)
        answers = await asyncio.gather(*(client.generate(prompt, **each) for prompt, each in asked))
        for prompt, each, answer in zip(prompts, options, answers, strict=True):
            assert answer.token_ids == oracle(prompt, **each), len(prompt)
    await until_idle(client)


async def test_plans_are_remote_for_cold_prompts_and_local_for_short_uncached_suffixes(client: AsyncClient) -> None:
    prompt = prompt_of(400, salt=3)
    cold = await client.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True)
    again = await client.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True)
    assert cold.plan.kind == "remote"
    assert (cold.usage.num_cached_tokens, cold.transfer.num_blocks, cold.transfer.kv_bytes) == (0, 25, 25 * 128)
    assert again.plan.kind == "local"
    assert again.usage.num_cached_tokens == 384, "all full blocks but the one that holds the last token"
    assert cold.token_ids == again.token_ids == oracle(prompt, max_tokens=4, ignore_eos=True)
    assert again.plan.predicted_cached_tokens == again.usage.num_cached_tokens


async def test_shared_prefix_is_cached_and_only_the_rest_moves(client: AsyncClient) -> None:
    prefix = prompt_of(320, salt=9)
    first = await client.generate([*prefix, *prompt_of(100, 1)], temperature=0, max_tokens=2, ignore_eos=True)
    second = await client.generate([*prefix, *prompt_of(100, 2)], temperature=0, max_tokens=2, ignore_eos=True)
    assert first.usage.num_cached_tokens == 0
    assert second.usage.num_cached_tokens == 320
    assert second.usage.num_decode_cached_tokens == 320
    assert second.transfer.num_blocks == first.transfer.num_blocks - 20


async def test_sampled_answers_are_a_function_of_the_seed(client: AsyncClient) -> None:
    prompt = prompt_of(50, salt=4)
    options: dict[str, Any] = {"temperature": 0.9, "seed": 42, "max_tokens": 20, "ignore_eos": True}
    alone = await client.generate(prompt, **options)
    crowd = [prompt_of(20 + i, salt=i) for i in range(15)]
    _others, again = await asyncio.gather(
        generate_all(client, crowd, temperature=1.0, max_tokens=20),
        client.generate(prompt, **options),
    )
    assert alone.token_ids == again.token_ids == oracle(prompt, **options)


async def test_n_samples_stream_each_token_once_in_order(client: AsyncClient) -> None:
    prompt = prompt_of(37, salt=5)
    answer = await client.generate(prompt, temperature=1.0, seed=8, n=4, max_tokens=15)
    for i, sample in enumerate(answer.samples):
        request = make_request(prompt, temperature=1.0, seed=8, n=4, max_tokens=15)
        assert sample.token_ids == tuple(expected_tokens(request, sample=i))


async def answered(client: AsyncClient, number: int) -> None:
    prompt, options = prompt_of(200 + number, salt=20 + number), mixed_sampling(number, max_tokens=NUM_TOKENS)
    assert (await client.generate(prompt, **options)).token_ids == oracle(prompt, **options)


async def embedded(client: AsyncClient, number: int) -> int:
    """Return the attempts that a right embedding of a long prompt took."""
    prompt = prompt_of(1000 + number, salt=number)
    vector = expected_embedding(prompt, Pooling.LAST).astype(np.float64)
    embedding = await client.embed(prompt)
    assert list(embedding.vector) == pytest.approx((vector / np.linalg.norm(vector)).tolist(), abs=1e-6)
    return embedding.num_attempts


async def until_replaced(client: AsyncClient, role: str, pid: int) -> None:
    async def is_back() -> bool:
        view = await worker(client, role)
        return view.state == "ready" and view.status is not None and view.status.pid != pid

    await until(is_back, timeout_s=60, what=f"the {role} worker is back")
    await until_idle(client)


async def test_kill_decode_worker_in_the_middle_of_streams_leaves_every_answer_complete(client: AsyncClient) -> None:
    running = asyncio.gather(*(answered(client, number) for number in range(NUM_STREAMS)))
    await until_decoding(client)
    pid = await kill_worker(client, "decode")
    await running
    await until_replaced(client, "decode", pid)


async def test_kill_prefill_worker_amid_prompts_costs_no_answer_and_no_embedding(
    client: AsyncClient,
) -> None:
    embedding = asyncio.gather(*(embedded(client, number) for number in range(24)))
    answering = asyncio.gather(*(answered(client, NUM_STREAMS + number) for number in range(NUM_STREAMS)))
    while not (await client.status()).router.num_active:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.01)
    pid = await kill_worker(client, "prefill")
    assert max(await embedding) > 1
    await answering
    await until_replaced(client, "prefill", pid)


async def test_n_samples_resume_from_their_own_tokens_after_a_decode_workers_kill(
    client: AsyncClient,
) -> None:
    prompt = prompt_of(150, salt=60)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": NUM_TOKENS, "n": NUM_STREAMS}
    options["ignore_eos"] = True
    result = asyncio.create_task(client.stream(prompt, **options).result())
    await until_decoding(client)
    await kill_worker(client, "decode")
    answer = await result
    for i, sample in enumerate(answer.samples):
        assert sample.token_ids == tuple(expected_tokens(make_request(prompt, **options), sample=i))
    await until_idle(client)


async def test_kill_decode_worker_in_the_middle_of_beams_finds_the_same_answers(client: AsyncClient) -> None:
    prompt = prompt_of(150, salt=61)
    options: dict[str, Any] = {"use_beam_search": True, "n": NUM_STREAMS, "max_tokens": NUM_TOKENS}
    options["ignore_eos"] = True
    result = asyncio.create_task(client.stream(prompt, **options).result())
    await until_decoding(client)
    await kill_worker(client, "decode")
    answer = await result
    assert len(answer.plans) > 1
    found = [list(sample.token_ids) for sample in answer.samples]
    assert found == expected_beams(make_request(prompt, **options))
    await until_idle(client)


async def until_decoding(client: AsyncClient) -> None:
    async def is_decoding() -> bool:
        view = await worker(client, "decode")
        return view.status is not None and view.status.load.num_running == NUM_STREAMS

    await until(is_decoding, timeout_s=60, what=f"{NUM_STREAMS} sequences decode")


async def test_client_that_goes_away_frees_everything_at_once(client: AsyncClient) -> None:
    for _ in range(3):
        async with client.stream(prompt_of(600, salt=77), temperature=0, max_tokens=2000, ignore_eos=True) as stream:
            await anext(stream)
        await until_idle(client, timeout_s=60)


async def test_200_requests_half_cancelled_some_hostile_leave_nothing_behind(client: AsyncClient) -> None:
    before = await pids(client)
    await send_chaos(client, num_requests=200)
    await until_idle(client)
    assert await pids(client) == before, "a process died"


async def test_router_reports_metrics_and_status(client: AsyncClient) -> None:
    status = await client.status()
    assert [view.worker_id for view in status.workers] == ["prefill-0", "decode-0"]
    assert status.router.num_completed > 0
    assert (await client.models())[0].name == "fake"
