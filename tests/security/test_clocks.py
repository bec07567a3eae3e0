"""A clock that is set ends no trust: what is not valid by it is made again by its owner."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.trust import proofs
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from tests.security.listeners import HOSTS, authority
from tests.security.test_rotation import Talker, serving

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


@pytest.mark.parametrize("set_by_s", [-_HOUR_S, _HOUR_S])
async def test_calls_go_on_after_the_clock_is_set(set_by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    own, offset_s = authority(is_encrypted=False), [-set_by_s]
    caller = Credentials.of(own, Role.ROUTER, "router-0", HOSTS)
    monkeypatch.setattr(proofs, "time", SimpleNamespace(time=lambda: time.time() + offset_s[0]))
    async with (
        serving(own, Talker()) as (server, _),  # type: ignore[abstract]
        connect_to(Role.WORKER, caller)(f"127.0.0.1:{server.port}") as channel,
    ):
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(Exception, match="not valid"):  # signed by a clock that differs
            await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())
        offset_s[0] = 0.0
        await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())


@pytest.mark.parametrize(("set_by_s", "is_due"), [(-_DAY_S, False), (0, False), (-60 * _DAY_S, True), (_DAY_S, True)])
def test_certificate_is_renewed_where_the_clock_puts_it_outside_of_its_life(
    set_by_s: float, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Credentials.of(authority(is_encrypted=True, lifetime_s=_DAY_S), Role.WORKER, "decode-0")
    now_s = time.time()
    monkeypatch.setattr(proofs, "time", SimpleNamespace(time=lambda: now_s + set_by_s))
    assert (mine.renewal_due_s == 0) is is_due
