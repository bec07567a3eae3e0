"""Router, prefill worker and decode worker as real processes around the fake engine, against its page-free oracle."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvrelay.client import AsyncClient
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import (
    fake_config,
    generate_all,
    kill_worker,
    mixed_sampling,
    running_cluster,
    until,
    until_idle,
    worker,
)
from tests.engine.beam_oracle import expected_beams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

LENGTHS = sorted({1, 2, *(16 * k + d for k in (1, 2, 3, 16, 32) for d in (-1, 0, 1)), 700})


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 256 for i in range(length)]


def oracle(prompt: list[int], **sampling: Any) -> tuple[int, ...]:
    return tuple(expected_tokens(make_request(prompt, **sampling)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    # A policy that goes by the threshold alone: what is cheaper on a busy machine would differ from run to run.
    router = {"port": 0, "policy": "longest_prefix", "local_prefill_max_tokens": 32}
    # Steps so long that answers which are looked at and hit in their middle last for seconds.
    async with running_cluster(tmp_path_factory.mktemp("fake"), fake_config(step_ms=15.0, router=router)) as client:
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


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_kill_worker_in_the_middle_of_8_streams_leaves_every_answer_complete(
    client: AsyncClient, role: str
) -> None:
    prompts = [prompt_of(200 + i, salt=20 + i) for i in range(8)]
    options = [mixed_sampling(number, max_tokens=300) for number in range(8)]
    streams = [client.stream(prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    results = [asyncio.create_task(stream.result()) for stream in streams]
    if role == "decode":
        await until(lambda: _is_decoding(client), timeout_s=60, what="8 sequences decode")
    pid = await kill_worker(client, role)
    for prompt, each, result in zip(prompts, options, await asyncio.gather(*results), strict=True):
        assert result.token_ids == oracle(prompt, **each)

    async def is_back() -> bool:
        view = await worker(client, role)
        return view.state == "ready" and view.status is not None and view.status.pid != pid

    await until(is_back, timeout_s=60, what=f"the {role} worker is back")
    await until_idle(client)


async def test_n_samples_resume_from_their_own_tokens_after_a_decode_workers_kill(
    client: AsyncClient,
) -> None:
    prompt = prompt_of(150, salt=60)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": 300, "ignore_eos": True, "n": 8}
    result = asyncio.create_task(client.stream(prompt, **options).result())
    await until(lambda: _is_decoding(client), timeout_s=60, what="8 samples decode")
    await kill_worker(client, "decode")
    answer = await result
    for i, sample in enumerate(answer.samples):
        assert sample.token_ids == tuple(expected_tokens(make_request(prompt, **options), sample=i))
    await until_idle(client)


async def test_kill_decode_worker_in_the_middle_of_beams_finds_the_same_answers(client: AsyncClient) -> None:
    prompt = prompt_of(150, salt=61)
    options: dict[str, Any] = {"use_beam_search": True, "n": 8, "max_tokens": 200, "ignore_eos": True}
    result = asyncio.create_task(client.stream(prompt, **options).result())
    await until(lambda: _is_decoding(client), timeout_s=60, what="8 beams decode")
    await kill_worker(client, "decode")
    answer = await result
    assert len(answer.plans) > 1
    found = [list(sample.token_ids) for sample in answer.samples]
    assert found == expected_beams(make_request(prompt, **options))
    await until_idle(client)


async def _is_decoding(client: AsyncClient) -> bool:
    view = await worker(client, "decode")
    return view.status is not None and view.status.load.num_running == 8


async def test_client_that_goes_away_frees_everything_at_once(client: AsyncClient) -> None:
    for _ in range(3):
        async with client.stream(prompt_of(600, salt=77), temperature=0, max_tokens=2000, ignore_eos=True) as stream:
            await anext(stream)
        await until_idle(client, timeout_s=60)


async def test_router_reports_metrics_and_status(client: AsyncClient) -> None:
    status = await client.status()
    assert [view.worker_id for view in status.workers] == ["prefill-0", "decode-0"]
    assert status.router.num_completed > 0
    assert (await client.models())[0].name == "fake"


async def test_two_clusters_side_by_side_do_not_meet(client: AsyncClient, tmp_path: Path) -> None:
    async with running_cluster(tmp_path, fake_config()) as other:
        assert (await other.status()).router.num_completed == 0
        prompt = prompt_of(64)
        answer = await other.generate(prompt, temperature=0, max_tokens=3)
        assert answer.token_ids == oracle(prompt, max_tokens=3)
