"""Workers and parts of a router that are alive and do not go on: requests do not wait for them until their deadline."""

import asyncio
from typing import NoReturn

import pytest

from tests.router.fake_worker import DECODE, FakeWorker, answer, pair
from tests.router.fakes import config_with, make_request, prompt_of, running_cluster


async def test_worker_that_grants_no_pages_is_left_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.generation_attempt.RESERVATION_TIMEOUT_S", 0.2)
    stuck, free = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    async with running_cluster(stuck, config=config_with()) as cluster:
        stuck.gates.close("reserve")
        generating = asyncio.create_task(cluster.generate(make_request(10, max_tokens=4)))
        await stuck.gates.reached("reserve")
        await cluster.set_workers(stuck, await free.start())
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 4)
        assert reply.plans[-1].decode_worker_id == "d1"
        stuck.gates.open("reserve")
        await cluster.until_idle()
    await free.die()


async def test_worker_that_sends_no_snapshot_of_its_blocks_is_lost_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.fleet.link.SNAPSHOT_TIMEOUT_S", 0.2)
    decode, late = FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)
    late.gates.close("update")
    async with running_cluster(decode) as cluster:
        await cluster.set_workers(decode, await late.start())
        await cluster.until_state("d1", "lost")
        late.gates.open("update")
        await cluster.until_state("d1", "ready")
        await cluster.until_idle()
    await late.die()


async def test_watch_for_silent_workers_that_fails_once_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []

    async with running_cluster(*pair()) as cluster:
        silence = cluster.router.door.parts.silence
        assert silence is not None

        def look() -> None:
            looks.append(True)
            if len(looks) == 1:
                raise MemoryError

        monkeypatch.setattr(silence, "look", look)
        await cluster.until(lambda _router: len(looks) > 2)


async def test_request_whose_bookkeeping_fails_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(*pair()) as cluster:

        def fail(*_: object) -> NoReturn:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(cluster.router.door.parts.admission, "settle", fail)
            reply = await cluster.generate(make_request(10, max_tokens=4))
        assert reply.token_ids() == answer(prompt_of(10), 4)
        await cluster.until_idle()
