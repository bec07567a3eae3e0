"""Trials: equal answers of healthy workers, past their caches; a broken one is found, and nothing stays behind."""

from typing import Any

import pytest

from common.errors import EngineFault, InvalidRequest, KvrelayError
from engine import fake
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from tests.rpc import answer_of
from tests.trust import as_controller, as_router
from tests.worker.cluster import Pool, running_pool
from worker.trial import PROMPTS

POOL: dict[str, dict[str, Any]] = {"prefill-0": {}, "decode-0": {}, "decode-1": {}}


async def run_trial(pool: Pool, name: str, *, num_tokens: int = 8, connect: Any = as_controller) -> list[list[int]]:
    """Return a worker's answers. Raises KvrelayError."""
    async with connect(pool.workers[name].address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        response = await answer_of(stub.RunTrial(worker_pb2.RunTrialRequest(num_tokens=num_tokens)))
    return [list(answer.token_ids) for answer in response.answers]


async def test_every_worker_gives_the_same_answers_and_holds_nothing_afterwards() -> None:
    async with running_pool(POOL) as pool:
        answers = [await run_trial(pool, name) for name in pool.workers]
        again = await run_trial(pool, "decode-0")
        assert all(each == again for each in answers)
        assert [len(answer) for answer in again] == [8] * len(PROMPTS)
        for worker in pool.workers.values():
            assert worker.runtime.calls.is_idle
            assert await worker.runtime.engine.call(lambda core: core.load().num_running) == 0


async def test_cached_blocks_neither_help_a_trial_nor_hide_a_broken_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pool(POOL) as pool:
        name = "decode-0"
        right = await run_trial(pool, name)
        monkeypatch.setattr(fake, "token_kv", lambda token_id, position: 0)
        wrong = await run_trial(pool, name)
        assert all(own != other for own, other in zip(wrong, right, strict=True))
        assert pool.workers[name].runtime.load.num_cached_tokens == 0


async def test_worker_whose_steps_fail_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(token_id: int, position: int) -> int:
        raise RuntimeError("device lost")

    async with running_pool(POOL) as pool:
        monkeypatch.setattr(fake, "token_kv", broken)
        with pytest.raises(EngineFault):
            await run_trial(pool, "decode-0")


async def test_only_the_controller_may_ask_and_only_for_a_few_tokens() -> None:
    async with running_pool(POOL) as pool:
        with pytest.raises(InvalidRequest, match="must be 1 to 64"):
            await run_trial(pool, "decode-0", num_tokens=65)
        with pytest.raises(KvrelayError, match="a router may not"):
            await run_trial(pool, "decode-0", connect=as_router)
