"""Embeddings over gRPC: the prefill pool answers alone, through the same door, line and recovery as generation."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from common.block_hash import hash_blocks
from common.config import parse_config
from common.errors import (
    CrashSuspected,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PromptTooLong,
    StaleEpoch,
    UnknownModel,
    WorkerLost,
)
from common.wire import pack_floats, unpack_floats
from kvrelay.client import AsyncClient, Unauthenticated
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import router_admin_pb2, sampling_pb2
from tests.router.fake_service import HIDDEN_SIZE, hidden_of
from tests.router.fake_worker import (
    BLOCK_SIZE,
    DECODE,
    PREFILL,
    ROOT,
    TIMEOUT_S,
    FakeWorker,
    Shape,
    answer,
    pair,
    sent_prompt,
)
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster

LAST, MEAN = sampling_pb2.POOLING_LAST, sampling_pb2.POOLING_MEAN


def embedding_of(num_tokens: int = 10, **fields: Any) -> pb.EmbedRequest:
    """Return a request for the embedding of a fixed prompt."""
    return pb.EmbedRequest(token_ids=pb.TokenIds(ids=prompt_of(num_tokens)), **fields)


def vector_of(response: pb.EmbedResponse) -> list[float]:
    values: list[float] = unpack_floats(response.embedding).tolist()
    return values


def unit(num_tokens: int = 10, pooling: int = LAST, dimensions: int = HIDDEN_SIZE) -> Any:
    """Return the normalized embedding of a fixed prompt."""
    vector = hidden_of(prompt_of(num_tokens), pooling)[:dimensions].astype(np.float64)
    return pytest.approx((vector / np.linalg.norm(vector)).tolist(), abs=1e-6)


def prefill_pool(count: int = 2) -> list[FakeWorker]:
    return [FakeWorker(f"p{number}", PREFILL) for number in range(count)]


async def test_prefill_workers_alone_answer_while_no_decode_worker_is_known() -> None:
    async with running_cluster(*prefill_pool(1)) as cluster:
        response = await cluster.embed(embedding_of())
        assert vector_of(response) == unit()
        (plan,) = response.plans
        assert (plan.kind, plan.prefill_worker_id, plan.decode_worker_id) == (pb.PLAN_KIND_PREFILL, "p0", "")
        usage = response.completed.usage
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (10, 0)
        assert (response.model, response.fingerprint) == ("fake", "fake-model")
        assert response.completed.timings.prefill_s == 0.25
        assert response.completed.timings.e2e_s >= response.completed.timings.queue_s > 0
        (request,) = cluster.prefill.requests
        assert (request.handoff_id, request.sequence.pooling) == ("", LAST)
        assert (await cluster.until_idle()).num_completed == 1


async def test_decode_workers_take_no_part(cluster: TestCluster) -> None:
    await cluster.embed(embedding_of())
    assert (len(cluster.prefill.requests), len(cluster.decode.requests)) == (1, 0)


async def test_form_of_the_vector_is_as_asked_for(cluster: TestCluster) -> None:
    raw = hidden_of(prompt_of(10), MEAN)
    assert vector_of(await cluster.embed(embedding_of(pooling=MEAN))) == unit(pooling=MEAN)
    assert vector_of(await cluster.embed(embedding_of(pooling=MEAN, normalize=False))) == raw.tolist()
    assert vector_of(await cluster.embed(embedding_of(dimensions=2))) == unit(dimensions=2)
    assert vector_of(await cluster.embed(embedding_of(dimensions=2, normalize=False, pooling=MEAN))) == raw[:2].tolist()


async def test_vector_of_zeros_stays_one() -> None:
    worker = FakeWorker("p0", PREFILL, embedding=bytes(4 * HIDDEN_SIZE))
    async with running_cluster(worker) as cluster:
        assert vector_of(await cluster.embed(embedding_of())) == [0.0] * HIDDEN_SIZE


async def test_prompt_goes_where_its_prefix_is_cached_but_a_mean_computes_everything() -> None:
    first, second = prefill_pool()
    async with running_cluster(first, second, config=config_with(policy="longest_prefix")) as cluster:
        second.publish(stored=hash_blocks(prompt_of(40), root=ROOT, block_size=BLOCK_SIZE).digests())
        await cluster.until_index_blocks(10)
        (plan,) = (await cluster.embed(embedding_of(40))).plans
        assert (plan.prefill_worker_id, plan.predicted_cached_tokens) == ("p1", 36)
        (plan,) = (await cluster.embed(embedding_of(40, pooling=MEAN))).plans
        assert plan.predicted_cached_tokens == 0


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
    monkeypatch.setattr("router.lives.NEWS_TIMEOUT_S", TIMEOUT_S)
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
        request = router_admin_pb2.SetWorkersRequest(workers=[first.endpoint, second.endpoint])
        request.workers[0].draining = True
        assert (await cluster.admin.SetWorkers(request)).num_users["p0"] == 1
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


async def test_deadline_ends_a_request_by_name() -> None:
    (worker,) = prefill_pool(1)
    worker.gates.close("first_token")
    async with running_cluster(worker) as cluster:
        with pytest.raises(DeadlineExceeded):
            await cluster.embed(embedding_of(), timeout_s=0.3)
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


async def test_generation_still_waits_for_a_decode_worker_that_embeddings_do_without() -> None:
    decode = FakeWorker("d0", DECODE)
    async with running_cluster(*prefill_pool(1)) as cluster:
        await cluster.embed(embedding_of())
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until_queued(1)
        await decode.start()
        await cluster.set_workers(cluster.prefill, decode)
        assert (await generating).token_ids() == answer(prompt_of(10), 6)
        await decode.die()


async def test_embeddings_pass_generations_that_wait_for_decode_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.admission.line.MAX_OVERTAKEN", 5)
    prefill, decode = pair()
    decode.set_load(num_free_blocks=0)
    async with running_cluster(prefill, decode) as cluster:
        waiting = await cluster_queue(cluster, 6)
        for number in range(9):  # more than may overtake a request of its own pool
            assert vector_of(await cluster.embed(embedding_of(5 + number % 3))) == unit(5 + number % 3)
        decode.set_load(num_free_blocks=64)
        await asyncio.gather(*waiting)


async def cluster_queue(cluster: TestCluster, count: int) -> list["asyncio.Task[Any]"]:
    """Start generations one after the other, which have to wait."""
    waiting = []
    for number in range(count):
        waiting.append(asyncio.create_task(cluster.generate(make_request(10 + number))))
        await cluster.until_queued(number + 1)
    return waiting


async def test_full_line_refuses_embeddings_as_it_refuses_generations() -> None:
    (worker,) = prefill_pool(1)
    worker.set_load(num_free_blocks=0)
    async with running_cluster(worker, config=config_with(max_queued=1)) as cluster:
        waiting = asyncio.create_task(cluster.embed(embedding_of()))
        await cluster.until_queued(1)
        with pytest.raises(Overloaded, match="limit is 1"):
            await cluster.embed(embedding_of())
        worker.set_load(num_free_blocks=64)
        assert vector_of(await waiting) == unit()


async def test_caller_without_a_key_is_refused() -> None:
    key = "embed-key-of-sixteen"
    tenants = [{"name": "a", "api_keys": [key]}]
    options = {"auth": "api_key", "salt_secret": "a-secret-of-sixteen", "http_port": None}
    config = parse_config({"router": options, "tenants": tenants}, source="test")
    async with running_cluster(*prefill_pool(1), config=config) as cluster:
        async with AsyncClient(cluster.router.address) as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.embed(prompt_of(10))
        async with AsyncClient(cluster.router.address, api_key=key) as somebody:
            assert list((await somebody.embed(prompt_of(10))).vector) == unit()
            assert [decision.plan.kind.value for decision in await somebody.explain()] == ["prefill"]


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (pb.EmbedRequest(), InvalidRequest, "prompt"),
        (pb.EmbedRequest(text=""), InvalidRequest, "prompt"),
        (pb.EmbedRequest(token_ids=pb.TokenIds()), InvalidRequest, "prompt"),
        (pb.EmbedRequest(token_ids=pb.TokenIds(ids=[1, 256])), InvalidRequest, "token_ids"),
        (embedding_of(200), PromptTooLong, "prompt"),
        (embedding_of(pooling=7), InvalidRequest, "pooling"),
        (embedding_of(dimensions=0), InvalidRequest, "dimensions"),
        (embedding_of(dimensions=HIDDEN_SIZE + 1), InvalidRequest, "dimensions"),
        (embedding_of(model="other"), UnknownModel, "model"),
        (embedding_of(objective=pb.ServiceObjective(ttft_s=-1)), InvalidRequest, "objective.ttft_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_refused_by_field(
    cluster: TestCluster, request_: pb.EmbedRequest, error: type[KvrelayError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await cluster.embed(request_)
    assert caught.value.field == field
    assert not cluster.prefill.requests
    await cluster.until_idle()


async def test_model_without_hidden_states_is_a_clear_refusal() -> None:
    able, unable = FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL, shape=Shape(hidden_size=0))
    for workers in ((unable,), (able, unable)):
        async with running_cluster(*workers) as cluster:
            with pytest.raises(InvalidRequest, match="cannot embed") as caught:
                await cluster.embed(embedding_of())
            assert caught.value.field == "model"


async def test_prompt_larger_than_every_prefill_worker_is_refused() -> None:
    async with running_cluster(FakeWorker("p0", PREFILL, shape=Shape(num_blocks=4))) as cluster:
        with pytest.raises(PromptTooLong, match="largest prefill worker has 4"):
            await cluster.embed(embedding_of(17))


async def test_embeddings_do_not_teach_how_long_answers_are(cluster: TestCluster) -> None:
    lengths = cluster.router.door.parts.orchestrator._lengths  # noqa: SLF001
    before = lengths.typical_tokens
    for _ in range(3):
        await cluster.embed(embedding_of())
    assert lengths.typical_tokens == before


async def test_call_of_a_grpc_client_that_knows_only_the_proto(cluster: TestCluster) -> None:
    method: Any = cluster.channel.unary_unary("/kvrelay.v1.InferenceService/Embed")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"\xff\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is not grpc.StatusCode.UNIMPLEMENTED
