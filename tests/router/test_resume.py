"""Answers that another router began: they continue after their tokens, and no token is repeated."""

from collections.abc import Mapping

import pytest

from common.errors import InvalidRequest, WorkerLost
from common.wire import pack_tokens
from kvrelay.v1 import inference_pb2
from tests.router.fake_service import VOCAB_SIZE
from tests.router.fake_worker import DECODE, FINGERPRINT, FakeWorker, answer, pair, sent_output
from tests.router.fakes import Reply, TestCluster, config_with, make_request, prompt_of, running_cluster

LOCAL = config_with(local_prefill_max_tokens=64)


def resumed(
    request: inference_pb2.GenerateRequest, samples: Mapping[int, list[int]], *, finished: tuple[int, ...] = ()
) -> inference_pb2.GenerateRequest:
    """Return the request of a client that has these tokens of each sample."""
    request.sampling.seed = 7
    for index in range(max(samples, default=-1) + 1):
        request.resume.samples.add(tokens=pack_tokens(samples.get(index, [])), is_finished=index in finished)
    request.resume.fingerprint = FINGERPRINT
    return request


def rest_of(reply: Reply, sample_index: int = 0) -> list[tuple[int, int]]:
    """Return (index, id) of the delivered tokens."""
    return [(token.token_index, token.token_id) for token in reply.tokens if token.sample_index == sample_index]


async def run(cluster: TestCluster, request: inference_pb2.GenerateRequest) -> Reply:
    reply = await cluster.generate(request)
    await cluster.until_idle()
    return reply


@pytest.mark.parametrize("config", [config_with(), LOCAL], ids=["remote", "local"])
@pytest.mark.parametrize("num_known", [0, 1, 3, 5])
async def test_resumed_answer_begins_behind_the_known_tokens_and_counts_them(num_known: int, config: object) -> None:
    whole = answer(prompt_of(10), 6)
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=config) as cluster:  # type: ignore[arg-type]
        reply = await run(cluster, resumed(make_request(10), {0: whole[:num_known]}))
    assert rest_of(reply) == list(enumerate(whole))[num_known:]
    assert reply.completed.usage.num_output_tokens == 6
    assert reply.completed.seed == 7
    assert sent_output(decode.requests[0].sequence) == whole[:num_known]


async def test_accepted_has_what_a_client_needs_to_resume_elsewhere(cluster: TestCluster) -> None:
    reply = await run(cluster, make_request(10))
    accepted = reply.messages[0].accepted
    assert accepted.fingerprint == FINGERPRINT
    assert accepted.seed == reply.completed.seed != 0


async def test_samples_go_on_each_from_its_own_tokens_and_ended_ones_stay_ended(cluster: TestCluster) -> None:
    wholes = [answer(prompt_of(10), 6, index) for index in range(4)]
    known = {0: wholes[0][:2], 1: wholes[1], 2: wholes[2][:5]}  # nothing of the last one yet
    reply = await run(cluster, resumed(make_request(10, n=4), known, finished=(1,)))
    for index in range(4):
        num_known = len(known.get(index, []))
        assert rest_of(reply, index) == list(enumerate(wholes[index]))[num_known:]
    assert reply.completed.usage.num_output_tokens == 24


async def test_samples_without_any_token_share_one_plan(cluster: TestCluster) -> None:
    reply = await run(cluster, resumed(make_request(10, n=3), {0: [], 1: [], 2: []}))
    assert len(reply.plans) == 1
    assert [reply.token_ids(index) for index in range(3)] == [answer(prompt_of(10), 6, index) for index in range(3)]


async def test_answer_that_is_complete_ends_without_any_worker(cluster: TestCluster) -> None:
    whole = {index: answer(prompt_of(10), 6, index) for index in range(2)}
    reply = await run(cluster, resumed(make_request(10, n=2), whole, finished=(0, 1)))
    assert reply.completed.usage.num_output_tokens == 12
    assert (await cluster.until_idle()).num_completed == 1
    assert not reply.tokens
    assert not cluster.prefill.requests
    assert not cluster.decode.requests


async def test_prompt_logprobs_that_came_with_the_first_token_do_not_come_again() -> None:
    whole = answer(prompt_of(10), 6)
    for num_known in (0, 2):
        request = resumed(make_request(10), {0: whole[:num_known]})
        request.sampling.prompt_logprobs = 0
        async with running_cluster(*pair()) as cluster:
            reply = await run(cluster, request)
        brought = [position for message in reply.messages for position in message.tokens.prompt_logprobs]
        assert len(brought) == (0 if num_known else 10)


async def test_resumed_answer_survives_the_death_of_its_new_worker() -> None:
    whole = answer(prompt_of(10), 6)
    prefill, decode = pair()
    decode.gates.close("token 4")
    second = FakeWorker("d1", DECODE)
    second.set_load(num_running=3, num_free_blocks=64)
    async with running_cluster(prefill, decode, second) as cluster:
        call = cluster.inference.Generate(resumed(make_request(10), {0: whole[:2]}), timeout=60)
        reply = Reply()
        await decode.gates.reached("token 4")
        await decode.die()
        await cluster.read(call, reply)
    assert rest_of(reply) == list(enumerate(whole))[2:]


@pytest.mark.parametrize(
    ("seed", "samples", "field"),
    [
        pytest.param(1, [(b"", False), (b"", False)], "resume.samples", id="too many samples"),
        pytest.param(1, [(pack_tokens([1, VOCAB_SIZE]), False)], "resume.samples[0].tokens", id="no such token"),
        pytest.param(1, [(b"\x01\x00\x00", False)], "resume.samples[0].tokens", id="half a token"),
        pytest.param(1, [(pack_tokens([1] * 6), False)], "resume.samples[0].tokens", id="nothing left"),
        pytest.param(1, [(pack_tokens([1] * 7), False)], "resume.samples[0].tokens", id="more than was asked for"),
        pytest.param(1, [(b"", True)], "resume.samples[0].is_finished", id="finished without a token"),
        pytest.param(None, [(pack_tokens([1]), False)], "sampling.seed", id="no seed"),
    ],
)
async def test_invalid_resume_names_its_field(
    cluster: TestCluster, seed: int | None, samples: list[tuple[bytes, bool]], field: str
) -> None:
    request = make_request(10, max_tokens=6)
    if seed is not None:
        request.sampling.seed = seed
    for tokens, is_finished in samples:
        request.resume.samples.add(tokens=tokens, is_finished=is_finished)
    with pytest.raises(InvalidRequest) as caught:
        await cluster.generate(request)
    assert caught.value.field == field
    assert (await run(cluster, make_request(10))).token_ids() == answer(prompt_of(10), 6)


async def test_answer_of_another_model_is_not_resumed(cluster: TestCluster) -> None:
    request = resumed(make_request(10), {0: [1]})
    request.resume.fingerprint = "another"
    with pytest.raises(WorkerLost, match="another"):
        await cluster.generate(request)
