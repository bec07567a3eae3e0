"""Requests whose workers fail: complete, identical answers, or a named error."""

import asyncio
import dataclasses
from typing import Any

import pytest

from common.errors import (
    EngineFault,
    HandoffGone,
    InvalidRequest,
    KvCorrupt,
    KvIncomplete,
    Refused,
    StaleEpoch,
    WorkerLost,
)
from common.ids import WorkerId, mint_epoch
from kvrelay.v1 import inference_pb2
from router.choosing.chooser import Chooser, Search
from router.fleet.booking import Booking
from router.record.crash_budget import Losses
from tests.router.fake_worker import (
    DECODE,
    PREFILL,
    ROOT,
    TIMEOUT_S,
    FakeWorker,
    Shape,
    answer,
    held_pair,
    pair,
    sent_output,
    trio,
)
from tests.router.fakes import Reply, TestCluster, config_with, make_request, prompt_of, running_cluster


@pytest.mark.parametrize("index", [1, 3, 5])
async def test_decode_dies_midstream_then_the_answer_goes_on_elsewhere(index: int) -> None:
    prefill, first, second = trio()
    first.gates.close(f"token {index}")
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(make_request(10), first, f"token {index}")
        await first.die()
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [(plan.decode_worker_id, plan.attempt) for plan in reply.plans] == [("d0", 1), ("d1", 2)]
        assert reply.completed.num_attempts == 2
        # The new workers go on from the tokens that were delivered.
        resumed = second.requests[0].sequence
        assert sent_output(resumed) == answer(prompt_of(10), index)
        assert resumed.hash_root == ROOT
        assert (await cluster.until_idle()).num_replans == 1


async def test_prefill_fails_then_its_blocks_are_no_longer_expected() -> None:
    prefill, decode = pair()
    prefill.faults["first_token"] = EngineFault("a step failed")
    async with running_cluster(prefill, decode, config=config_with(max_attempts=1)) as cluster:
        with pytest.raises(EngineFault):
            await cluster.generate(make_request(10))
        assert (await cluster.until_idle()).num_index_blocks == 0


async def test_client_cancels_during_prefill_then_its_blocks_are_no_longer_expected(cluster: TestCluster) -> None:
    cluster.prefill.gates.close("first_token")
    generating = await cluster.start(make_request(10), cluster.prefill, "first_token")
    assert (await cluster.status()).router.num_index_blocks == 2
    generating.cancel()
    assert (await cluster.until_idle()).num_index_blocks == 0


async def test_only_decode_dies_then_the_answer_waits_for_its_restart(cluster: TestCluster) -> None:
    cluster.decode.gates.close("token 3")
    generating = await cluster.start(make_request(10), cluster.decode, "token 3")
    await cluster.decode.die()
    await cluster.until_state("d0", "lost")
    assert not generating.done()
    cluster.decode.gates.open("token 3")
    await cluster.decode.restart()
    reply = await generating
    assert reply.token_ids() == answer(prompt_of(10), 6)
    assert reply.completed.timings.max_itl_s > 0
    await cluster.until_idle()


async def test_request_that_lost_its_worker_is_served_before_those_that_wait() -> None:
    decode = FakeWorker("d0", DECODE, shape=Shape(num_blocks=4))
    decode.gates.close("token 3")
    async with running_cluster(decode) as cluster:
        first = await cluster.start(make_request(10), decode, "token 3")
        second = asyncio.create_task(cluster.generate(make_request(9)))  # no pages are left for it
        await cluster.until_queued(1)
        await decode.die()
        await cluster.until_queued(2)
        decode.gates.open("token 3")
        await decode.restart()
        assert (await first).token_ids() == answer(prompt_of(10), 6)
        assert (await second).token_ids() == answer(prompt_of(9), 6)
        assert decode.prompt_lengths == [10, 10, 9]


async def test_decode_never_comes_back_then_the_request_fails_by_name() -> None:
    prefill, decode = pair()
    decode.gates.close("token 3")
    async with running_cluster(prefill, decode, config=config_with(recovery_timeout_s=0.2)) as cluster:
        call = cluster.inference.Generate(make_request(10), timeout=TIMEOUT_S)
        reply = Reply()
        reading = asyncio.create_task(cluster.read(call, reply))
        await decode.gates.reached("token 3")
        await cluster.until(lambda _router: len(reply.tokens) == 3)
        await decode.die()
        with pytest.raises(WorkerLost):
            await reading
        # What was generated was delivered before the error.
        assert reply.token_ids() == answer(prompt_of(10), 3)
        await cluster.until_idle()


async def test_prefill_dies_before_first_token_then_decode_serves_alone(cluster: TestCluster) -> None:
    cluster.prefill.gates.close("first_token")
    cluster.decode.gates.close("fetch")
    generating = await cluster.start(make_request(10), cluster.prefill, "first_token")
    await cluster.prefill.die()
    reply = await generating
    assert reply.token_ids() == answer(prompt_of(10), 6)
    assert [plan.kind for plan in reply.plans] == [inference_pb2.PLAN_KIND_REMOTE, inference_pb2.PLAN_KIND_LOCAL]
    await cluster.until_idle()
    assert cluster.decode.calls["cancelled"] == 1  # the first call was closed, not left


async def test_what_a_failed_attempt_has_written_is_told_as_written_not_as_found() -> None:
    prefill, first, second = trio()
    for worker in (first, second):
        worker.gates.close("fetch")
    prefill.gates.close("first_token")
    request = make_request(10)
    request.cache_marks.add(ttl_s=60)
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(request, prefill, "first_token")
        prefill.num_cached_tokens = 8  # of the request's own prompt
        await first.die()
        await second.gates.reached("fetch")
        prefill.gates.open("first_token")
        second.gates.open("fetch")
        usage = (await generating).completed.usage
    assert usage.num_cached_tokens == 0
    assert list(usage.cache_writes) == [inference_pb2.CacheWrite(ttl_s=60, num_tokens=8)]


async def test_prefill_dies_then_another_one_takes_over() -> None:
    first, second, decode = FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)
    second.set_load(num_pending_prefill_tokens=50)
    first.gates.close("prefill")
    async with running_cluster(first, second, decode) as cluster:
        generating = await cluster.start(make_request(10), first, "prefill")
        await first.die()
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [plan.prefill_worker_id for plan in reply.plans] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("failed", "chosen"), [([], "p0"), (["p0"], "p1"), (["p1"], "p0"), (["p1", "p0"], "p0"), (["p0 before"], "p0")]
)
async def test_pair_that_failed_in_the_handoff_is_chosen_again_only_as_the_last(
    failed: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network between the two may be cut, while each of them answers the router."""
    first, second, decode = FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)
    second.set_load(num_pending_prefill_tokens=50)
    choose = Chooser.choose

    async with running_cluster(first, second, decode) as cluster:
        fleet = cluster.router.fleet
        lives = {name: fleet.lives.of(WorkerId(name)) for name in ("p0", "p1", "d0")}
        lives["p0 before"] = WorkerId("p0"), mint_epoch()
        pairs: Any = [(lives[name], lives["d0"]) for name in failed]
        monkeypatch.setattr(
            Chooser, "choose", lambda self, search: choose(self, dataclasses.replace(search, failed_pairs=pairs))
        )
        reply = await cluster.generate(make_request(10))
        assert [plan.prefill_worker_id for plan in reply.plans] == [chosen]


async def test_request_that_failed_in_the_handoff_remembers_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair()
    decode.faults["fetch"] = KvIncomplete("cut")
    asked: list[Any] = []
    choose = Chooser.choose

    def noting(self: Chooser, search: Search) -> Booking | Refused:
        asked.append(set(search.failed_pairs))
        return choose(self, search)

    monkeypatch.setattr(Chooser, "choose", noting)
    async with running_cluster(prefill, decode) as cluster:
        reply = await cluster.generate(make_request(10))
        fleet = cluster.router.fleet
        assert reply.completed.num_attempts == 2
        assert (asked[0], asked[-1]) == (set(), {(fleet.lives.of(WorkerId("p0")), fleet.lives.of(WorkerId("d0")))})


@pytest.mark.parametrize(("error", "num_losses"), [(KvCorrupt("sum"), 0), (KvIncomplete("cut"), 1)])
async def test_bytes_that_changed_on_the_way_are_the_loss_of_no_worker(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, error: KvIncomplete, num_losses: int
) -> None:
    """Else a request is refused when its workers are cut off, for other reasons, soon after they have answered."""
    noted: list[object] = []
    monkeypatch.setattr(Losses, "note", lambda _losses, lives, **_when: noted.append(lives))
    cluster.decode.faults["fetch"] = error
    reply = await cluster.generate(make_request(10))
    assert reply.completed.num_attempts == 2
    assert len(noted) == num_losses


@pytest.mark.parametrize(
    ("worker_id", "gate"), [("p0", "prefill"), ("p0", "first_token"), ("d0", "fetch"), ("d0", "token 2")]
)
async def test_worker_reports_a_fault_then_the_request_is_planned_again(
    cluster: TestCluster, worker_id: str, gate: str
) -> None:
    faults = (WorkerLost("gone"), StaleEpoch("new"), EngineFault("step"), HandoffGone("gone"), KvIncomplete("sum"))
    for number, error in enumerate(faults, 1):
        cluster.workers[worker_id].faults[gate] = error
        reply = await cluster.generate(make_request(10))
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert reply.completed.num_attempts == 2, error
        assert (await cluster.until_idle()).num_replans == number


async def test_worker_faults_every_time_then_the_error_reaches_the_client() -> None:
    prefill, decode = pair()
    decode.num_skipped_steps = 1  # so each attempt yields the prefill worker's token, and then a gap
    async with running_cluster(prefill, decode, config=config_with(max_attempts=3)) as cluster:
        with pytest.raises(EngineFault, match="jumps from token 2 to 4"):
            await cluster.generate(make_request(10))
        assert (await cluster.until_idle()).num_replans == 2


async def test_worker_rejects_the_request_then_the_client_gets_the_error_at_once(cluster: TestCluster) -> None:
    cluster.decode.faults["reserve"] = InvalidRequest("no", field="sampling.n")
    with pytest.raises(InvalidRequest) as caught:
        await cluster.generate(make_request(10))
    assert caught.value.field == "sampling.n"
    assert (len(cluster.decode.requests), (await cluster.until_idle()).num_replans) == (1, 0)


async def test_decode_restarted_unnoticed_then_its_stale_epoch_leads_to_the_new_one(cluster: TestCluster) -> None:
    cluster.decode.epoch = mint_epoch()  # as if the process were a new one behind the same connection
    reply = await cluster.generate(make_request(10))
    assert reply.token_ids() == answer(prompt_of(10), 6)
    assert cluster.decode.requests[0].epoch != cluster.decode.requests[1].epoch == cluster.decode.epoch


async def test_workers_come_back_with_another_model_then_the_answer_is_not_continued(cluster: TestCluster) -> None:
    cluster.decode.gates.close("token 3")
    generating = await cluster.start(make_request(10), cluster.decode, "token 3")
    for worker in (cluster.prefill, cluster.decode):
        worker.shape = Shape(fingerprint="other")
        await worker.die()
    await cluster.until_state("p0", "lost")
    await cluster.until_state("d0", "lost")
    cluster.decode.gates.open("token 3")
    for worker in (cluster.prefill, cluster.decode):
        await worker.restart()
    with pytest.raises(WorkerLost, match="fake-model"):
        await generating
    await cluster.until_idle()


@pytest.mark.parametrize("gate", ["token 3", "prefill"])
async def test_client_cancels_during_recovery_then_nothing_is_left(gate: str) -> None:
    async with running_cluster(*held_pair(gate)) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until_held(gate)
        await asyncio.gather(cluster.decode.die(), cluster.prefill.die())
        await cluster.until_queued(1)
        generating.cancel()
        assert (await cluster.until_idle()).num_cancelled == 1
