"""Embeddings over gRPC: the prefill pool answers alone, in the form asked for, and bad input is refused by field."""

import asyncio

import pytest

from common.block_hash import hash_blocks
from common.errors import InvalidRequest, KvrelayError, PromptTooLong, UnknownModel
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.router_admin_pb2 import SetWorkersRequest
from tests.router.embeddings import LAST, MEAN, embedding_of, prefill_pool, unit, vector_of
from tests.router.fake_service import HIDDEN_SIZE, hidden_of
from tests.router.fake_worker import BLOCK_SIZE, DECODE, PREFILL, ROOT, FakeWorker, Shape
from tests.router.fakes import TestCluster, config_with, prompt_of, running_cluster


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


async def test_cluster_without_a_prefill_pool_refuses_at_once_and_says_what_to_do() -> None:
    async with running_cluster(FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE)) as cluster:
        decode, without = cluster.decode.endpoint, SetWorkersRequest(without_prefill=True)
        without.workers.append(decode)
        await cluster.embed(embedding_of())
        await cluster.admin.SetWorkers(without)
        with pytest.raises(InvalidRequest, match=r"kvrelay scale prefill=1"):
            await cluster.embed(embedding_of())
        await cluster.set_workers(cluster.prefill, cluster.decode)
        await cluster.embed(embedding_of())


async def test_embedding_that_waits_for_a_pool_is_refused_when_there_will_be_none() -> None:
    async with running_cluster(FakeWorker("d0", DECODE)) as cluster:
        asked = asyncio.ensure_future(cluster.embed(embedding_of()))
        await cluster.until(lambda router: router.num_request_tasks > 0)
        await cluster.admin.SetWorkers(SetWorkersRequest(without_prefill=True))
        with pytest.raises(InvalidRequest, match=r"kvrelay scale prefill=1"):
            await asked


async def test_embedding_waits_for_the_first_prefill_worker_of_a_pool_that_starts() -> None:
    late, first = FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE)
    late.gates.close("describe")
    await late.start()
    try:
        async with running_cluster(first) as cluster:
            await cluster.set_workers(first, late)
            asked = asyncio.ensure_future(cluster.embed(embedding_of()))
            await late.gates.reached("describe")
            late.gates.open("describe")
            assert vector_of(await asked) == unit()
    finally:
        await late.die()


async def test_form_of_the_vector_is_as_asked_for(cluster: TestCluster) -> None:
    raw = hidden_of(prompt_of(10), MEAN)
    assert vector_of(await cluster.embed(embedding_of(pooling=MEAN))) == unit(pooling=MEAN)
    assert vector_of(await cluster.embed(embedding_of(pooling=MEAN, normalize=False))) == raw.tolist()
    assert vector_of(await cluster.embed(embedding_of(dimensions=2))) == unit(dimensions=2)
    assert vector_of(await cluster.embed(embedding_of(dimensions=2, normalize=False, pooling=MEAN))) == raw[:2].tolist()
    assert (len(cluster.prefill.requests), len(cluster.decode.requests)) == (4, 0)


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


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (pb.EmbedRequest(), InvalidRequest, "prompt"),
        (pb.EmbedRequest(text=""), InvalidRequest, "prompt"),
        (pb.EmbedRequest(token_ids=pb.TokenIds()), InvalidRequest, "prompt"),
        (embedding_of(200), PromptTooLong, "prompt"),
        (embedding_of(pooling=7), InvalidRequest, "pooling"),
        (embedding_of(model="other"), UnknownModel, "model"),
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
