"""Embeddings whose workers fail, leave or are full: planned again or kept waiting, as generations are."""

import asyncio

import numpy as np
import pytest

from common.errors import CrashSuspected, EngineFault, StaleEpoch, WorkerLost
from common.wire import pack_floats
from tests.router.embeddings import embedding_of, prefill_pool, unit, vector_of
from tests.router.fake_service import HIDDEN_SIZE
from tests.router.fake_worker import DECODE, PREFILL, TIMEOUT_S, FakeWorker, pair, sent_prompt
from tests.router.fakes import config_with, make_request, prompt_of, running_cluster


@pytest.mark.parametrize("gate", ["prefill", "first_token"])
async def test_worker_dies_in_the_middle_then_another_one_answers(gate: str) -> None:
    first, second = prefill_pool()
    second.set_load(num_pending_prefill_tokens=50)
    first.gates.close(gate)
    async with running_cluster(first, second) as cluster:
        embedding = asyncio.create_task(cluster.embed(embedding_of()))
        await first.gates.reached(gate)
        await first.die()
        response = await embedding
        assert vector_of(response) == unit()
        assert response.completed.num_attempts == 2
        assert [sent_prompt(request.sequence) for request in second.requests] == [prompt_of(10)]
        assert (await cluster.until_idle()).num_replans == 1


async def test_worker_reports_a_fault_then_the_request_is_planned_again() -> None:
    (worker,) = prefill_pool(1)
    async with running_cluster(worker) as cluster:
        for error in (WorkerLost("gone"), StaleEpoch("new"), EngineFault("step")):
            worker.faults["first_token"] = error
            response = await cluster.embed(embedding_of())
            assert (vector_of(response), response.completed.num_attempts) == (unit(), 2), error


async def test_worker_whose_vector_cannot_be_is_a_faulty_one() -> None:
    worker = FakeWorker("p0", PREFILL)
    vectors = bytes(1), bytes(4 * (HIDDEN_SIZE - 1)), bytes(4 * HIDDEN_SIZE + 1), pack_floats([np.nan] * HIDDEN_SIZE)
    async with running_cluster(worker, config=config_with(max_attempts=2)) as cluster:
        for number, worker.embedding in enumerate(vectors, 1):
            with pytest.raises(EngineFault, match="finite"):
                await cluster.embed(embedding_of())
            assert (await cluster.until_idle()).num_replans == number


async def test_worker_that_refuses_is_left_out_and_another_one_answers() -> None:
    first, second = prefill_pool()
    second.set_load(num_pending_prefill_tokens=50)
    first.num_refusals = 1
    async with running_cluster(first, second) as cluster:
        response = await cluster.embed(embedding_of())
        assert [plan.prefill_worker_id for plan in response.plans] == ["p1"]
        assert response.completed.num_attempts == 1


async def test_prompt_that_ends_its_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.lives.NEWS_TIMEOUT_S", TIMEOUT_S)
    workers = prefill_pool()
    for worker in workers:
        worker.poison = prompt_of(13)
    async with running_cluster(*workers, config=config_with(max_lost_workers=2)) as cluster:
        with pytest.raises(CrashSuspected):
            await cluster.embed(embedding_of(13))
        num_crashes = sum(worker.num_crashes for worker in workers)
        with pytest.raises(CrashSuspected):
            await cluster.embed(embedding_of(13))
        assert sum(worker.num_crashes for worker in workers) == num_crashes == 2
        assert vector_of(await cluster.embed(embedding_of(12))) == unit(12)


async def test_draining_worker_gets_no_embeddings_but_finishes_its_own() -> None:
    first, second = prefill_pool()
    second.set_load(num_pending_prefill_tokens=50)
    first.gates.close("first_token")
    async with running_cluster(first, second) as cluster:
        running = asyncio.create_task(cluster.embed(embedding_of(9)))
        await first.gates.reached("first_token")
        assert (await cluster.use([first.endpoint, second.endpoint], draining=("p0",))).num_users["p0"] == 1
        (plan,) = (await cluster.embed(embedding_of())).plans
        assert plan.prefill_worker_id == "p1"
        first.gates.open("first_token")
        assert [plan.prefill_worker_id for plan in (await running).plans] == ["p0"]


@pytest.mark.parametrize("gate", ["queue", "prefill", "first_token"])
async def test_client_that_leaves_frees_everything(gate: str) -> None:
    (worker,) = prefill_pool(1)
    if gate == "queue":
        worker.set_load(num_free_blocks=0)
    else:
        worker.gates.close(gate)
    async with running_cluster(worker) as cluster:
        call = cluster.inference.Embed(embedding_of())
        if gate == "queue":
            await cluster.until_queued(1)
        else:
            await worker.gates.reached(gate)
        call.cancel()
        assert (await cluster.until(lambda router: router.num_cancelled)).num_cancelled == 1
        await cluster.until_idle()


async def test_without_a_prefill_worker_the_error_says_so() -> None:
    async with running_cluster(FakeWorker("d0", DECODE), config=config_with(queue_timeout_s=0.1)) as cluster:
        with pytest.raises(WorkerLost, match="no prefill worker"):
            await cluster.embed(embedding_of())


async def test_lost_pool_is_waited_for() -> None:
    (worker,) = prefill_pool(1)
    async with running_cluster(worker) as cluster:
        await worker.die()
        await cluster.until_state("p0", "lost")
        embedding = asyncio.create_task(cluster.embed(embedding_of()))
        await cluster.until_queued(1)
        await worker.restart()
        assert vector_of(await embedding) == unit()


async def test_embeddings_pass_generations_that_wait_for_decode_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.line.pool_line.MAX_OVERTAKEN", 5)
    prefill, decode = pair()
    decode.set_load(num_free_blocks=0)
    async with running_cluster(prefill, decode) as cluster:
        waiting = await cluster.queue(*(make_request(10 + number) for number in range(6)))
        for number in range(9):  # more than may overtake a request of its own pool
            assert vector_of(await cluster.embed(embedding_of(5 + number % 3))) == unit(5 + number % 3)
        decode.set_load(num_free_blocks=64)
        await waiting
