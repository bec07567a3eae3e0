"""Prefixes that a worker pulls out of another one's vLLM: the tokens are those of a prompt that is computed."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from common.block_hash import BlockHashes
from common.trust.identity import Role
from engine.request import EngineRequest
from engine.vllm.cache_mirror import CacheMirror
from engine.vllm.driver import VllmDriver
from engine.vllm.start import start_vllm
from kv_transfer.transports.grpc_chunks import GrpcChunks
from kvrelay.v1 import worker_pb2
from tests.trust import as_router, credentials_of
from tests.vllm.conftest import BLOCK_SIZE, options, request_of
from tests.worker.cluster import Pool, make_runtime, serve_runtime
from tests.worker.prefixes import outcomes, where
from tests.worker.test_prefix_service import hot, pull
from worker.environment import Environment
from worker.prefix_pull import PullOutcome

pytestmark = [pytest.mark.model, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

NUM_BLOCKS = 4
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(short_model_dir: Path) -> AsyncIterator[Pool]:
    """A prefill worker of three ranks and a decode worker of one, each over a vLLM of its own."""
    torch.set_num_threads(1)
    pool = Pool({}, {})
    workers = [("prefill-0", worker_pb2.WORKER_ROLE_PREFILL, 3), ("decode-0", worker_pb2.WORKER_ROLE_DECODE, 1)]
    for name, role, num_ranks in workers:
        told = dataclasses.replace(options(short_model_dir, dtype="float32"), tensor_parallel=num_ranks)
        vllm: Any = await asyncio.to_thread(start_vllm, told, {})
        real = Environment.real(credentials_of(Role.WORKER, name))
        environment = dataclasses.replace(real, drive=VllmDriver.of)
        runtime = make_runtime(role, name, transports=("grpc",), executor=vllm, environment=environment)
        worker = pool.workers[name] = await serve_runtime(runtime)
        pool.channels[name] = as_router(worker.address)
    yield pool
    for channel in pool.channels.values():
        await channel.close()
    for worker in pool.workers.values():
        await worker.stop(0)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_is_left(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Wait for the end of everything that a test has begun; all staged blocks are free then."""
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)  # the machine may be busy
    for worker in pool.workers.values():
        worker.runtime.prefixes.outcomes.clear()
    yield
    await pool.until_empty()
    for worker in pool.workers.values():
        kv: Any = worker.runtime.executor.kv
        assert kv.num_free == kv.num_blocks


def prompt(number: int, **sampling: Any) -> EngineRequest:
    """Return a request of some blocks and a half, of which no other number has one."""
    told: EngineRequest = request_of(
        [(number * 997 + i * 31) % 40_000 + 100 for i in range(NUM_TOKENS + 16)], **sampling
    )
    return told


async def test_hot_prefixes_move_into_another_vllm_and_are_found_there(pool: Pool) -> None:
    """While pages are empty: first of these tests."""
    pair = pool.pair("prefill-0", "decode-0")
    await pair.answer_locally(prompt(6))
    computed = await pair.answer_locally(prompt(5))
    assert (await pair.answer_locally(prompt(5))).num_cached == NUM_TOKENS
    took = await pull(pair.prefill, where(pair.decode), await hot(pair.decode, NUM_BLOCKS))
    assert (took.num_pulled_blocks, took.num_left_blocks) == (NUM_BLOCKS, 0)
    moved = await pair.answer(prompt(5))
    assert (moved.num_cached, moved.num_pulled) == (NUM_TOKENS, 0), "those that were found again come first"
    assert moved.tokens == computed.tokens


async def test_a_prefix_pulled_for_an_answer_gives_the_same_tokens_and_is_cached(pool: Pool) -> None:
    pair = pool.pair("prefill-0", "decode-0")
    await pair.answer(prompt(1, max_tokens=1))  # it ends where it is prefilled
    computed = await pair.answer_locally(prompt(1, salt="computed"))
    pulled = await pair.answer_locally(prompt(1), where(pair.prefill, NUM_BLOCKS))
    cached = await pair.answer_locally(prompt(1), where(pair.prefill, NUM_BLOCKS))
    assert [(each.num_cached, each.num_pulled) for each in (computed, pulled, cached)] == [
        (0, 0),
        (NUM_TOKENS, NUM_TOKENS),
        (NUM_TOKENS, 0),
    ]
    assert computed.tokens == pulled.tokens == cached.tokens
    assert outcomes(pair.decode) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 1}


async def test_a_prefix_pulled_for_a_handoff_gives_the_same_tokens_also_for_samples(pool: Pool) -> None:
    """The next turn of a chat, whose history a decode worker has; into three ranks, and on from them."""
    pair = pool.pair("prefill-0", "decode-0")
    told: dict[str, Any] = {"temperature": 0.9, "seed": 5, "n": 2}
    computed = await pair.answer_locally(prompt(2, **told))
    handed_over = await pair.answer(prompt(2, **told), where(pair.decode, NUM_BLOCKS))
    assert (handed_over.num_cached, handed_over.num_pulled) == (NUM_TOKENS, NUM_TOKENS)
    assert handed_over.tokens == computed.tokens
    assert outcomes(pair.prefill) == {PullOutcome.PULLED: 1}


async def test_requests_that_pull_the_same_prefix_at_once_move_it_once(pool: Pool) -> None:
    pair = pool.pair("prefill-0", "decode-0")
    await pair.answer(prompt(3, max_tokens=1))
    source = where(pair.prefill, NUM_BLOCKS)
    asked = [pair.answer_locally(prompt(3, max_tokens=4 + i), source) for i in range(3)]
    answers = await asyncio.gather(*asked)
    assert sorted(answer.num_pulled for answer in answers) == [0, 0, NUM_TOKENS]
    assert outcomes(pair.decode) == {PullOutcome.PULLED: 1, PullOutcome.PRESENT: 2}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, PullOutcome.INCOMPLETE),
        ({"epoch": 5}, PullOutcome.STALE),
        ({"address": "127.0.0.1:1", "worker_id": "unknown"}, PullOutcome.LOST),
    ],
)
async def test_a_broken_pull_is_computed_with_the_same_tokens(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], outcome: PullOutcome
) -> None:
    """A bit of the last block flips on the way, behind three that are here; or there is no source."""
    number = 10 + list(PullOutcome).index(outcome)
    pair = pool.pair("prefill-0", "decode-0")
    await pair.answer(prompt(number, max_tokens=1))
    computed = await pair.answer_locally(prompt(number, salt="computed"))
    seal = GrpcChunks.seal

    def flipped(transport: GrpcChunks, *args: Any) -> Any:
        messages = seal(transport, *args)
        last = messages[-1].chunk
        last.data = bytes((last.data[0] ^ 1, *last.data[1:]))
        return messages

    monkeypatch.setattr(GrpcChunks, "seal", flipped)
    answer = await pair.answer_locally(prompt(number), where(pair.prefill, NUM_BLOCKS, **changes))
    assert (answer.num_cached, answer.num_pulled) == (0, 0), "nothing unverified is used"
    assert answer.tokens == computed.tokens
    assert outcomes(pair.decode) == {outcome: 1}


async def test_blocks_that_the_source_has_just_evicted_are_computed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker hears of an eviction when the step behind it has been planned."""
    pair = pool.pair("prefill-0", "decode-0")
    await pair.answer(prompt(4, max_tokens=1))
    computed = await pair.answer_locally(prompt(4, salt="computed"))
    names = CacheMirror.vllm_names

    def late(mirror: CacheMirror, hashes: BlockHashes) -> tuple[bytes, ...]:
        found = names(mirror, hashes)
        return (*found[:2], b"gone" * 8, *found[3:]) if found else ()

    monkeypatch.setattr(CacheMirror, "vllm_names", late)
    answer = await pair.answer_locally(prompt(4), where(pair.prefill, NUM_BLOCKS))
    assert answer.num_pulled == 2 * BLOCK_SIZE
    assert answer.tokens == computed.tokens
    assert outcomes(pair.decode) == {PullOutcome.PARTIAL: 1}
