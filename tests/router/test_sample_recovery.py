"""Answers with several samples, beams or prompt logprobs whose worker fails: all is complete, nothing comes twice."""

from common.errors import EngineFault, WorkerLost
from kvrelay.v1 import sequence_pb2
from tests.router.fake_worker import answer, sent_output, trio
from tests.router.fakes import TestCluster, make_request, prompt_of, running_cluster


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


async def test_beams_and_decode_dies_then_all_begin_again_and_nothing_comes_twice() -> None:
    prefill, first, second = trio()
    first.gates.close("token 3")
    request = make_request(10, n=2)
    request.sampling.use_beam_search = True
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(request, first, "token 3")
        await first.die()
        reply = await generating
        assert [reply.token_ids(0), reply.token_ids(1)] == [answer(prompt_of(10), 6, i) for i in (0, 1)]
        (again,) = [worker_request.sequence for worker_request in second.requests]
        assert (again.first_sample_index, again.sampling.n, sent_output(again)) == (0, 2, [])
        assert not again.HasField("beams")
        await cluster.until_idle()


async def test_beams_whose_state_is_known_go_on_from_there() -> None:
    prefill, first, second = trio()
    first.beams = sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=bytes(8), score=-1.5)])
    first.gates.close("token 1")
    request = make_request(10, n=2)
    request.sampling.use_beam_search = True
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(request, first, "token 1")
        await first.die()
        reply = await generating
        assert [reply.token_ids(0), reply.token_ids(1)] == [answer(prompt_of(10), 6, i) for i in (0, 1)]
        assert [r.sequence.beams for r in second.requests] == [first.beams]
        assert not any(r.sequence.HasField("beams") for r in prefill.requests)


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
