"""Membership, parity, events and load, seen through a running router."""

import asyncio
import time
from dataclasses import replace

import pytest

from common.block_hash import hash_blocks
from common.ids import WorkerId
from router.fleet.facts import WorkerEndpoint, find_mismatch
from router.reading.codec import ByteCodec
from tests.router.fake_worker import BLOCK_SIZE, DECODE, PREFILL, ROOT, TIMEOUT_S, FakeWorker, Shape, pair
from tests.router.fakes import TestCluster, make_request, prompt_of, running_cluster
from tests.router.members import book, make_facts

HASHES = hash_blocks(prompt_of(12), root=ROOT, block_size=BLOCK_SIZE)


async def predicted(cluster: TestCluster, num_prompt_tokens: int = 14) -> int:
    reply = await cluster.generate(make_request(num_prompt_tokens, max_tokens=2))
    return reply.plans[0].predicted_cached_tokens


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (Shape(fingerprint="other"), "fingerprint is 'other', but worker d0 has 'fake-model'"),
        (Shape(block_size=8), "block_size is 8, but worker d0 has 4"),
        (Shape(vocab_size=300), "vocab_size is 300"),
        (Shape(model_name="x"), "model_name is 'x'"),
        (Shape(probe=b"0" * 16), "hash_probe differs"),
        (Shape(num_blocks=0), "must be positive"),
        (Shape(text=replace(ByteCodec.probes, tokenizer=b"other")), "tokenizer_probe differs"),
        (Shape(text=replace(ByteCodec.probes, tokenizer=b"")), "tokenizer_probe is missing"),
        (Shape(text=replace(ByteCodec.probes, template=b"other")), "template_probe differs"),
        (Shape(text=replace(ByteCodec.probes, template=b"")), "template_probe is missing"),
    ],
)
async def test_worker_that_does_not_fit_is_refused_and_says_why(shape: Shape, why: str) -> None:
    good, bad = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE, shape=shape)
    async with running_cluster(good) as cluster:
        await bad.start()
        assert await cluster.set_workers(good, bad) == 1
        await cluster.until_state("d1", "refused")
        view = await cluster.view("d1")
        assert why in view.state
        assert not view.HasField("status")
        await cluster.generate(make_request())
        assert not bad.requests
        await bad.die()


async def test_worker_of_another_name_or_role_is_refused() -> None:
    worker = FakeWorker("d0", DECODE)
    async with running_cluster() as cluster:
        await worker.start()
        as_prefill = worker.endpoint
        as_prefill.role = PREFILL
        other = worker.endpoint
        other.worker_id = "d9"
        for endpoint, why in ((as_prefill, "role is decode, wanted prefill"), (other, "is worker 'd0', not 'd9'")):
            cluster.router.fleet.set_workers(
                [WorkerEndpoint(worker_id=WorkerId(endpoint.worker_id), role=endpoint.role, address=endpoint.address)]
            )
            await cluster.until_state(endpoint.worker_id, "refused")
            assert why in (await cluster.view(endpoint.worker_id)).state
        await worker.die()


async def test_refused_worker_that_comes_back_with_right_facts_is_used() -> None:
    good, bad = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE, shape=Shape(fingerprint="other"))
    async with running_cluster(good) as cluster:
        await bad.start()
        await cluster.set_workers(good, bad)
        await cluster.until_state("d1", "refused")
        bad.shape = Shape()
        await bad.restart()
        await cluster.until_state("d1", "ready")
        await bad.die()


async def test_set_workers_is_idempotent() -> None:
    worker = FakeWorker("d0", DECODE)
    async with running_cluster(worker) as cluster:
        for _ in range(3):
            assert await cluster.set_workers(worker) == 1
        assert worker.num_watches == 1


async def test_removed_worker_gets_no_new_requests_but_ends_what_it_has() -> None:
    old, new = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    old.gates.close("token 3")
    async with running_cluster(old) as cluster:
        generating = await cluster.start(make_request(), old, "token 3")
        await new.start()
        await cluster.set_workers(new)
        await cluster.until_state("d1", "ready")
        assert [view.worker_id for view in (await cluster.status()).workers] == ["d1"]
        await cluster.generate(make_request())
        old.gates.open("token 3")
        assert len((await generating).token_ids()) == 6
        assert (len(old.requests), len(new.requests)) == (1, 1)
        await new.die()


async def test_worker_that_leaves_in_order_has_not_ended_under_its_requests() -> None:
    goes, dies = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    async with running_cluster(goes, dies) as cluster:
        fleet = cluster.router.fleet
        facts = {worker_id: member.facts for worker_id, member in fleet.members_by_id.items()}
        lives = {(worker_id, each.epoch) for worker_id, each in facts.items() if each is not None}
        assert len(lives) == 2
        await dies.die()
        await cluster.until_state("d1", "lost")
        fleet.set_workers([])
        assert {worker_id for worker_id, _epoch in await fleet.lives.find_ended(lives)} == {"d1"}


async def test_life_that_ended_was_last_ready_when_it_answered_after_a_failure() -> None:
    """So a request that failed before does not count its end."""
    worker, other = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    async with running_cluster(worker, other) as cluster:
        fleet = cluster.router.fleet
        life, member = fleet.lives.of(WorkerId("d0")), fleet.members_by_id[WorkerId("d0")]
        assert life is not None
        before_s = time.monotonic()
        fleet.suspect(book(member), "a call failed")
        await cluster.until_state("d0", "ready")
        await worker.die()
        await cluster.until_state("d0", "lost")
        assert (await fleet.lives.find_ended([life]))[life] > before_s


async def test_life_that_ended_was_ready_until_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a request that failed on another worker of its plan, while this one served, does not count its end."""
    monkeypatch.setattr("router.fleet.fleet.LOSS_SKEW_S", 0.0)
    worker, other = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    async with running_cluster(worker, other) as cluster:
        lives = cluster.router.fleet.lives
        life = lives.of(WorkerId("d0"))
        assert life is not None
        dies_s = time.monotonic()
        await worker.die()
        await cluster.until_state("d0", "lost")
        assert (await lives.find_ended([life]))[life] >= dies_s


def test_worker_with_absurd_blocks_is_refused_before_its_hashes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []
    monkeypatch.setattr("router.fleet.facts.hash_probe", lambda _root, block_size: probed.append(block_size))
    endpoint = WorkerEndpoint(worker_id=WorkerId("d0"), role=DECODE, address="127.0.0.1:1")
    facts = replace(make_facts(num_blocks=64), block_size=2**32 - 1)
    why = find_mismatch(facts, endpoint=endpoint, reference=None, probes=None)
    assert why == "block_size is 4294967295; at most 4096 is accepted"
    assert not probed


async def test_status_is_returned_although_a_worker_leaves_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.doors.service.STATUS_TIMEOUT_S", TIMEOUT_S)
    stays, goes = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    async with running_cluster(stays, goes) as cluster:
        goes.gates.close("status")
        asking = asyncio.create_task(cluster.status())
        await goes.gates.reached("status")
        await cluster.set_workers(stays)
        views = {view.worker_id: view for view in (await asking).workers}
    assert views["d0"].HasField("status")
    assert not views["d1"].HasField("status")


async def test_status_shows_every_worker_and_its_own_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.doors.service.STATUS_TIMEOUT_S", TIMEOUT_S)
    prefill, decode = pair()
    decode.set_load(num_running=3)
    async with running_cluster(decode, prefill) as cluster:
        status = await cluster.status()
        assert [(view.worker_id, view.role, view.state) for view in status.workers] == [
            ("p0", PREFILL, "ready"),
            ("d0", DECODE, "ready"),
        ]
        assert status.workers[1].status.load.num_running == 3
        assert status.router.policy == "predictive"
        await prefill.die()
        await cluster.until_state("p0", "lost")
        assert not (await cluster.view("p0")).HasField("status")


async def test_events_feed_the_index() -> None:
    prefill, decode = pair()
    prefill.blocks.update(HASHES[:1])
    async with running_cluster(prefill, decode) as cluster:
        await cluster.until_index_blocks(1)  # the snapshot
        prefill.publish(stored=HASHES)
        await cluster.until_index_blocks(3)
        prefill.publish(removed=HASHES[2:])
        await cluster.until_index_blocks(2)
        assert await predicted(cluster) == 2 * BLOCK_SIZE


async def test_gap_in_events_leads_to_a_snapshot(cluster: TestCluster) -> None:
    cluster.prefill.blocks.update(HASHES)  # the messages that told of these are lost
    cluster.prefill.publish(lost=1)
    await cluster.until_index_blocks(3)
    assert cluster.prefill.num_watches == 2
    assert await predicted(cluster) == 3 * BLOCK_SIZE


async def test_new_epoch_forgets_the_blocks_of_the_old_one() -> None:
    prefill, decode = pair()
    prefill.blocks.update(HASHES)
    async with running_cluster(prefill, decode) as cluster:
        await cluster.until_index_blocks(3)
        await prefill.restart()
        await cluster.until_index_blocks(0)
        await cluster.until_state("p0", "ready")
        assert await predicted(cluster) == 0


async def test_routing_expects_the_blocks_that_it_sends(cluster: TestCluster) -> None:
    assert [await predicted(cluster), await predicted(cluster)] == [0, 3 * BLOCK_SIZE]
