"""Hints of routers about returns: checked at the worker's door, and harmless where there is nothing to keep."""

from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.return_notes import MAX_WAITING
from tests.rpc import answer_of
from tests.trust import as_controller, as_router
from tests.worker.cluster import running_pool
from worker.service import MAX_RETURNS

HASH = bytes(16)


async def expect(address: str, *returns: worker_pb2.ExpectedReturn, connect: Any = as_router) -> None:
    """Send hints. Raises KvrelayError."""
    async with connect(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        await answer_of(stub.ExpectReturns(worker_pb2.ExpectReturnsRequest(returns=returns)))


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"ends": [b"short"], "like_s": [1.0]}, "returns.ends"),
        ({"ends": [HASH]}, "returns.like_s"),
        ({"ends": [HASH], "like_s": [1.0, 2.0]}, "returns.like_s"),
        ({"ends": [HASH], "like_s": [1.0] * 65, "ages_s": [1.0] * 64}, "returns.like_s"),
        ({"ends": [HASH], "like_s": [float("nan")]}, "returns.ages_s"),
        ({"ends": [HASH], "like_s": [-1.0]}, "returns.ages_s"),
        ({"ends": [HASH], "like_s": [1.0, 2.0, 3.0], "ages_s": [5.0, 4.0]}, "returns.ages_s"),
    ],
)
async def test_hint_that_makes_no_sense_is_refused_by_its_field(hint: dict[str, Any], field: str) -> None:
    async with running_pool({"decode-0": {}}) as pool:
        with pytest.raises(InvalidRequest) as refused:
            await expect(pool.workers["decode-0"].address, worker_pb2.ExpectedReturn(**hint))
    assert refused.value.field == field


async def test_only_routers_hint_and_unknown_blocks_change_nothing() -> None:
    hint = worker_pb2.ExpectedReturn(ends=[HASH], like_s=[1.0])
    async with running_pool({"decode-0": {}}) as pool:
        worker = pool.workers["decode-0"]
        with pytest.raises(KvrelayError):
            await expect(worker.address, hint, connect=as_controller)
        await expect(worker.address, hint)
        assert await worker.runtime.engine.call(lambda core: core.load().num_running) == 0
        with pytest.raises(InvalidRequest, match=f"at most {MAX_RETURNS}"):
            await expect(worker.address, *[hint] * (MAX_RETURNS + 1))
        assert MAX_WAITING <= MAX_RETURNS
