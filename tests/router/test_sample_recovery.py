"""Answers with several samples, beams or prompt logprobs whose worker fails: all is complete, nothing comes twice."""

import pytest

from common.errors import EngineFault, WorkerLost
from kvrelay.v1 import sequence_pb2
from tests.router.fake_worker import answer, sent_output, trio
from tests.router.fakes import TestCluster, make_request, prompt_of, running_cluster

_BEAMS = sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=bytes(8), score=-1.5)])


async def test_two_samples_and_decode_dies_then_each_goes_on_by_itself() -> None:
    prefill, first, second = trio()
    first.gates.close("token 3")
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(make_request(10, n=2), first, "token 3")
        await first.die()
        reply = await generating
        assert [reply.token_ids(0), reply.token_ids(1)] == [answer(prompt_of(10), 6, i) for i in (0, 1)]
        resumed = sorted((r.sequence for r in second.requests), key=lambda s: s.first_sample_index)
        assert [(s.first_sample_index, s.sampling.n, len(sent_output(s))) for s in resumed] == [
            (0, 1, 3),
            (1, 1, 3),
        ]
        assert reply.completed.usage.num_output_tokens == 12
        await cluster.until_idle()


@pytest.mark.parametrize(
    ("gate", "known"),
    [
        pytest.param("token 3", None, id="all begin again"),
        pytest.param("token 1", _BEAMS, id="all go on from where they were"),
    ],
)
async def test_beams_and_decode_dies_then_nothing_comes_twice(gate: str, known: sequence_pb2.BeamState | None) -> None:
    prefill, first, second = trio()
    first.beams = known
    first.gates.close(gate)
    request = make_request(10, n=2)
    request.sampling.use_beam_search = True
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(request, first, gate)
        await first.die()
        reply = await generating
        assert [reply.token_ids(0), reply.token_ids(1)] == [answer(prompt_of(10), 6, i) for i in (0, 1)]
        (again,) = [worker_request.sequence for worker_request in second.requests]
        assert (again.first_sample_index, again.sampling.n) == (0, 2)
        assert known or not sent_output(again)
        assert (again.beams if again.HasField("beams") else None) == known
        assert not any(r.sequence.HasField("beams") for r in prefill.requests)
        await cluster.until_idle()


async def test_two_samples_before_the_first_token_are_planned_again_together(cluster: TestCluster) -> None:
    cluster.prefill.faults["first_token"] = EngineFault("step")
    reply = await cluster.generate(make_request(10, n=2))
    assert [reply.token_ids(0), reply.token_ids(1)] == [answer(prompt_of(10), 6, i) for i in (0, 1)]
    assert [request.sequence.sampling.n for request in cluster.prefill.requests] == [2, 2]


async def test_one_of_two_samples_has_ended_when_decode_dies_then_only_the_other_goes_on(cluster: TestCluster) -> None:
    stop = answer(prompt_of(10), 6, 0)[1]
    cluster.decode.faults["token 3"] = WorkerLost("gone")
    reply = await cluster.generate(make_request(10, n=2, stop_token_ids=[stop]))
    assert reply.token_ids(0) == answer(prompt_of(10), 2, 0)
    assert reply.token_ids(1) == answer(prompt_of(10), 6, 1)
    assert cluster.decode.requests[-1].sequence.first_sample_index == 1


async def test_prompt_logprobs_are_not_asked_for_again(cluster: TestCluster) -> None:
    cluster.decode.faults["token 3"] = WorkerLost("gone")
    request = make_request(10)
    request.sampling.prompt_logprobs = 0
    reply = await cluster.generate(request)
    assert sum(bool(message.tokens.prompt_logprobs) for message in reply.messages) == 1
    assert [r.sequence.sampling.HasField("prompt_logprobs") for r in cluster.decode.requests] == [True, False]
