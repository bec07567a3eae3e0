"""KV leaves a worker only to the puller, and for the blocks, that a ticket names."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.errors import AccessDenied, from_rpc_error
from common.ids import Epoch, HandoffId, WorkerId
from common.trust import tickets
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.tickets import ANY_CACHED, PullRight, issuer, of_blocks, of_handoff
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2
from tests.security.listeners import authority
from tests.trust import as_worker, credentials_of
from tests.worker.calls import messages
from tests.worker.prefixes import prompt, warm_pool
from worker.serving import RunningWorker

PULLER = WorkerId("prefill-1")
ROUTER, CONTROLLER, WORKER = (
    issuer(lambda role=role: credentials_of(role, "somebody").held.signer)  # type: ignore[misc]
    for role in (Role.ROUTER, Role.CONTROLLER, Role.WORKER)
)
_STRANGER = Credentials.of(authority(is_encrypted=False), Role.ROUTER, "router-0")
STRANGER = issuer(lambda: _STRANGER.held.signer)
"""A router of another cluster of the same name."""
Issue = Callable[[PullRight], str]


@pytest_asyncio.fixture
async def source() -> AsyncIterator[RunningWorker]:
    """A worker that has the KV of a tenant's prompt in its cache and has sent none since."""
    async with warm_pool() as pool:
        pool.workers["prefill-0"].runtime.bytes_sent.clear()
        yield pool.workers["prefill-0"]


def hashes() -> bytes:
    return prompt(1).block_hashes.packed


def right_to(source: RunningWorker, /, **changes: Any) -> PullRight:
    """Return the right of prefill-1 to the tenant's blocks."""
    right = PullRight(
        puller=PULLER,
        source=source.runtime.worker_id,
        epoch=source.runtime.epoch,
        subject=of_blocks(hashes()),
    )
    return replace(right, **changes)


def asking(source: RunningWorker, ticket: str, /, **changes: Any) -> pb.OpenFetch:
    fields: dict[str, Any] = {
        "epoch": source.runtime.epoch,
        "layout_fingerprint": source.runtime.executor.kv.shape.fingerprint,
        "transports": [worker_pb2.KV_TRANSPORT_GRPC],
        "block_hashes": hashes(),
        "ticket": ticket,
    }
    return pb.OpenFetch(**(fields | changes))


async def fetched(source: RunningWorker, opened: pb.OpenFetch, caller: str = PULLER) -> int:
    """Return how many bytes of KV a worker gets. Raises KvrelayError."""
    num_bytes = 0
    async with as_worker(source.kv_address, caller) as channel:
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(channel).FetchBlocks()
        await call.write(pb.FetchBlocksRequest(open=opened))
        try:
            async for message in messages(call):
                num_bytes += len(message.chunk.data)
                if message.HasField("manifest"):
                    await call.write(pb.FetchBlocksRequest(ack=pb.AckFetch()))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return num_bytes


async def assert_denied(source: RunningWorker, opened: pb.OpenFetch, caller: str = PULLER) -> None:
    with pytest.raises(AccessDenied, match="cannot pull"):
        await fetched(source, opened, caller)
    assert source.runtime.bytes_sent.total() == 0
    assert source.runtime.handoffs.num_leases == 0


async def test_ticket_of_a_router_gives_its_puller_the_blocks_that_it_names(source: RunningWorker) -> None:
    assert await fetched(source, asking(source, ROUTER(right_to(source)))) > 0


async def test_ticket_of_the_controller_gives_any_cached_blocks_but_no_handoff(source: RunningWorker) -> None:
    ticket = CONTROLLER(right_to(source, subject=ANY_CACHED))
    assert await fetched(source, asking(source, ticket)) > 0
    source.runtime.bytes_sent.clear()
    await assert_denied(source, asking(source, ticket, block_hashes=b"", handoff_id="ho-1"))


@pytest.mark.parametrize("ticket", ["", "not.a.ticket"])
async def test_knowing_the_hashes_is_not_enough(source: RunningWorker, ticket: str) -> None:
    await assert_denied(source, asking(source, ticket))


@pytest.mark.parametrize(
    ("issue", "changes"),
    [
        pytest.param(WORKER, {}, id="of a worker"),
        pytest.param(WORKER, {"subject": ANY_CACHED}, id="of a worker for everything"),
        pytest.param(ROUTER, {"subject": ANY_CACHED}, id="of a router for everything"),
        pytest.param(CONTROLLER, {}, id="of the controller for some blocks"),
        pytest.param(STRANGER, {}, id="of another cluster"),
        pytest.param(ROUTER, {"puller": WorkerId("decode-0")}, id="for another puller"),
        pytest.param(ROUTER, {"source": WorkerId("prefill-1")}, id="for another source"),
        pytest.param(ROUTER, {"epoch": Epoch(7)}, id="for another life"),
        pytest.param(ROUTER, {"subject": of_blocks(b"x" * 16)}, id="for other blocks"),
        pytest.param(ROUTER, {"subject": of_handoff(HandoffId("ho-1"))}, id="for a handoff"),
        pytest.param(ROUTER, {"subject": of_blocks(hashes()[:32])}, id="for fewer blocks"),
    ],
)
async def test_ticket_of_the_wrong_issuer_or_for_another_pull_is_refused(
    source: RunningWorker, issue: Issue, changes: dict[str, Any]
) -> None:
    await assert_denied(source, asking(source, issue(right_to(source, **changes))))


async def test_ticket_does_not_give_others_of_the_prompts_blocks(source: RunningWorker) -> None:
    first_two = ROUTER(right_to(source, subject=of_blocks(hashes()[:32])))
    await assert_denied(source, asking(source, first_two, block_hashes=hashes()[16:48]))


async def test_stolen_ticket_serves_only_its_puller(source: RunningWorker) -> None:
    await assert_denied(source, asking(source, ROUTER(right_to(source))), caller="decode-0")


async def test_ticket_ends_with_its_time(source: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "LIFETIME_S", -3600.0)
    await assert_denied(source, asking(source, ROUTER(right_to(source))))
