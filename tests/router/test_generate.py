"""Requests without failures."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from common.block_hash import hash_blocks
from common.errors import InvalidRequest
from common.ids import BlockHash
from common.wire import unpack_tokens
from kvrelay.v1 import inference_pb2, sampling_pb2, worker_pb2
from router.record.record import RunningRequest
from tests.router.fake_service import VOCAB_SIZE
from tests.router.fake_worker import (
    BLOCK_SIZE,
    DECODE,
    FINGERPRINT,
    ROOT,
    FakeWorker,
    Shape,
    answer,
    hashes_of,
    pair,
    sent_prompt,
)
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster


async def test_generate_remote_plan_delivers_every_token_and_the_facts(cluster: TestCluster) -> None:
    cluster.prefill.num_cached_tokens, cluster.decode.num_cached_tokens = 4, 8
    reply = await cluster.generate(make_request(10, max_tokens=6))
    assert reply.token_ids() == answer(prompt_of(10), 6)
    assert reply.messages[0].accepted.num_prompt_tokens == 10
    assert [(p.kind, p.prefill_worker_id, p.decode_worker_id, p.attempt) for p in reply.plans] == [
        (inference_pb2.PLAN_KIND_REMOTE, "p0", "d0", 1)
    ]
    completed = reply.completed
    assert completed.usage == inference_pb2.Usage(
        num_prompt_tokens=10, num_output_tokens=6, num_cached_tokens=4, num_decode_cached_tokens=8
    )
    assert (completed.num_attempts, completed.transfer.kv_bytes, completed.timings.prefill_s) == (1, 100, 0.25)
    assert (completed.timings.transfer_s, completed.timings.transfer_exposed_s) == (0.5, 0.125)
    assert 0 < completed.timings.queue_s <= completed.timings.ttft_s <= completed.timings.e2e_s
    handoff = cluster.decode.requests[0].handoff
    assert handoff.handoff_id == cluster.prefill.requests[0].handoff_id != ""
    assert (handoff.prefill_worker_id, handoff.prefill_epoch) == ("p0", cluster.prefill.epoch)
    assert handoff.prefill_address == cluster.prefill.address
    status = await cluster.until_idle()
    assert status.num_completed == 1


@pytest.mark.parametrize("is_refused", [False, True])
async def test_request_knows_the_time_that_workers_compiled_for_it(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    records: list[RunningRequest] = []

    def running(*args: Any, **options: Any) -> RunningRequest:
        records.append(RunningRequest(*args, **options))
        return records[-1]

    monkeypatch.setattr("router.requests.orchestrator.RunningRequest", running)
    prefill, decode = pair()
    prefill.compile_s, decode.compile_s = 0.25, 0.5
    if is_refused:
        prefill.faults["prefill"] = InvalidRequest("no such grammar", spent_s=0.125)
    async with running_cluster(prefill, decode) as cluster:
        with suppress(InvalidRequest):
            await cluster.generate(make_request(10))
    assert [record.compile_s for record in records] == [0.625 if is_refused else 0.75]


async def test_generate_without_prefill_worker_plans_local() -> None:
    decode = FakeWorker("d0", DECODE, num_cached_tokens=4)
    async with running_cluster(decode) as cluster:
        reply = await cluster.generate(make_request(10, max_tokens=3))
        assert reply.token_ids() == answer(prompt_of(10), 3)
        assert [plan.kind for plan in reply.plans] == [inference_pb2.PLAN_KIND_LOCAL]
        assert not decode.requests[0].HasField("handoff")
        assert (reply.completed.usage.num_cached_tokens, reply.completed.timings.prefill_s) == (4, 0.25)
        await cluster.until_idle()


@pytest.mark.parametrize("has_prefill", [False, True])
async def test_decode_worker_holds_prompts_back_only_without_prefill_workers(
    has_prefill: bool,
) -> None:
    prefill, decode = pair()
    async with running_cluster(*([prefill] if has_prefill else []), decode) as cluster:
        request = make_request(10, max_tokens=3)
        request.objective.tpot_s = 0.5
        await cluster.generate(request)
        sequence = decode.requests[0].sequence
        assert (sequence.tpot_slo_s if sequence.HasField("tpot_slo_s") else None) == (None if has_prefill else 0.5)


@pytest.mark.parametrize(
    ("lone_gap_s", "num_samples", "objective_s", "expected_s"),
    [
        (0.5, 8, None, 1.5),  # a slow model has an objective that it can keep
        (0.5, 8, 0.4, 1.5),  # so do requests that ask for more
        (0.5, 8, 0.6, 0.6),
        (0.15, 8, None, 0.2),  # the configured one can be kept
        (0.5, 1, None, 0.2),  # too few steps to know
    ],
)
async def test_gap_objective_that_the_model_cannot_keep_becomes_one_that_bounds_the_batch(
    lone_gap_s: float, num_samples: int, objective_s: float | None, expected_s: float | None
) -> None:
    decode = FakeWorker("d0", DECODE)
    decode.timing = worker_pb2.TimingReport(
        prefill=worker_pb2.StepModel(constant_s=0.01, num_samples=8),
        decode=worker_pb2.StepModel(constant_s=lone_gap_s, num_samples=num_samples),
        max_step_tokens=512,
    )
    async with running_cluster(decode) as cluster:
        request = make_request(10, max_tokens=3)
        if objective_s is not None:
            request.objective.tpot_s = objective_s
        await cluster.generate(request)
        sequence = decode.requests[0].sequence
    assert (sequence.tpot_slo_s if sequence.HasField("tpot_slo_s") else None) == expected_s


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE * 2 - 1, BLOCK_SIZE * 2, BLOCK_SIZE * 2 + 1])
async def test_router_looks_for_the_hashes_that_a_worker_computes_from_the_sequence(
    cluster: TestCluster, num_tokens: int
) -> None:
    await cluster.generate(make_request(num_tokens))
    expected = hash_blocks(prompt_of(num_tokens), root=ROOT, block_size=BLOCK_SIZE)
    assert [hashes_of(worker.requests[0].sequence) for worker in (cluster.prefill, cluster.decode)] == [
        expected,
        expected,
    ]


async def test_generate_short_suffix_on_decode_plans_local() -> None:
    prefill, decode = pair()
    hashes = hash_blocks(prompt_of(12), root=ROOT, block_size=BLOCK_SIZE)
    async with running_cluster(prefill, decode, config=config_with(local_prefill_max_tokens=4)) as cluster:
        first = await cluster.generate(make_request(12))
        decode.publish(stored=[*hashes, BlockHash(bytes(16))])
        await cluster.until_index_blocks(4)  # the prefill worker's three, and the one that only decode has
        second = await cluster.generate(make_request(12))
    # 12 tokens are 3 blocks; the last token is always computed, so 8 tokens count as cached.
    assert [(plan.kind, plan.predicted_cached_tokens) for plan in first.plans + second.plans] == [
        (inference_pb2.PLAN_KIND_REMOTE, 0),
        (inference_pb2.PLAN_KIND_LOCAL, 8),
    ]
    assert first.token_ids() == second.token_ids()


async def test_generate_while_the_same_prompt_is_on_its_way_to_decode_stays_remote() -> None:
    prefill, decode = pair()
    prefill.gates.close("first_token")
    async with running_cluster(prefill, decode, config=config_with(local_prefill_max_tokens=4)) as cluster:
        first = await cluster.start(make_request(12), prefill, "first_token")
        second = asyncio.create_task(cluster.generate(make_request(12)))
        await cluster.until(lambda _router: len(prefill.requests) == 2)
        prefill.gates.open("first_token")
        plans = (await first).plans + (await second).plans
    assert [(plan.kind, plan.predicted_cached_tokens) for plan in plans] == [
        (inference_pb2.PLAN_KIND_REMOTE, 0),
        (inference_pb2.PLAN_KIND_REMOTE, 8),
    ]


async def test_generate_when_first_token_is_the_last_cancels_decode(cluster: TestCluster) -> None:
    cluster.decode.gates.close("fetch")  # decode never gets anywhere by itself
    reply = await cluster.generate(make_request(10, max_tokens=1))
    assert reply.token_ids() == answer(prompt_of(10), 1)
    assert reply.tokens[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    await cluster.until_idle()
    assert cluster.decode.calls["cancelled"] == 1


async def test_generate_two_samples_delivers_both_and_ends_each_by_itself(cluster: TestCluster) -> None:
    prompt = prompt_of(10)
    first, second = answer(prompt, 6, 0), answer(prompt, 6, 1)
    stop = first[2]
    assert stop not in second
    reply = await cluster.generate(make_request(10, n=2, stop_token_ids=[stop]))
    assert (reply.token_ids(0), reply.token_ids(1)) == (first[:3], second)
    assert reply.completed.usage.num_output_tokens == 9


async def test_generate_prompt_logprobs_are_delivered_once(cluster: TestCluster) -> None:
    request = make_request(10)
    request.sampling.prompt_logprobs = 0
    reply = await cluster.generate(request)
    with_logprobs = [m.tokens for m in reply.messages if m.tokens.prompt_logprobs]
    assert [[entry.chosen.token_id for entry in delta.prompt_logprobs] for delta in with_logprobs] == [prompt_of(10)]
    assert with_logprobs[0].tokens[0].token_index == 0


async def test_generate_draws_a_seed_and_reports_it(cluster: TestCluster) -> None:
    drawn = await cluster.generate(make_request())
    assert drawn.completed.seed == cluster.decode.requests[0].sequence.sampling.seed
    request = make_request()
    request.sampling.seed = 7
    assert (await cluster.generate(request)).completed.seed == 7


async def test_generate_text_and_chat_are_tokenized_as_tokenize_does() -> None:
    decode = FakeWorker("d0", DECODE)
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    sampling = sampling_pb2.SamplingParams(max_tokens=1)
    async with running_cluster(decode) as cluster:
        await cluster.generate(inference_pb2.GenerateRequest(chat=chat, sampling=sampling))
        await cluster.generate(inference_pb2.GenerateRequest(text="hi", sampling=sampling))
        tokenized = await cluster.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert sent_prompt(decode.requests[0].sequence) == list(tokenized.token_ids)
    assert "".join(tokenized.pieces) == "user: hi\nassistant:"
    assert bytes(sent_prompt(decode.requests[1].sequence)) == b"hi"


@pytest.mark.parametrize("is_exact", [True, False])
async def test_an_answer_that_may_change_at_near_ties_when_its_worker_is_lost_says_so(is_exact: bool) -> None:
    other = FakeWorker("d1", DECODE, shape=Shape(exact_resume=is_exact))
    async with running_cluster(FakeWorker("d0", DECODE), other) as cluster:
        [model] = (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models
        sampling = sampling_pb2.SamplingParams(max_tokens=1)
        reply = await cluster.generate(inference_pb2.GenerateRequest(text="hi", sampling=sampling))
        assert (model.exact_resume, reply.messages[0].accepted.exact_resume) == (is_exact, is_exact)
        assert (model.name, model.max_model_len, model.vocab_size, model.fingerprint) == ("fake", 200, 256, FINGERPRINT)


@pytest.mark.parametrize("is_local", [False, True])
async def test_generate_without_text_delivers_runs_only(is_local: bool) -> None:
    prefill, decode = pair()
    async with running_cluster(*([decode] if is_local else [prefill, decode])) as cluster:
        request = make_request(10, max_tokens=6, n=2)
        request.sampling.detokenize = False
        reply = await cluster.generate(request)
        assert not reply.tokens
        for sample_index in range(2):
            runs = [run for m in reply.messages for run in m.tokens.runs if run.sample_index == sample_index]
            ids: list[int] = []
            for run in runs:
                assert run.first_token_index == len(ids)
                ids += unpack_tokens(run.tokens, vocab_size=VOCAB_SIZE, field="")
            assert ids == answer(prompt_of(10), 6, sample_index)
        assert reply.completed.usage.num_output_tokens == 12
