"""KV leaves a worker only to the puller, and for the blocks, that a ticket names."""

from collections.abc import AsyncIterator
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
from tests.worker.cluster import Pool, messages
from tests.worker.prefixes import prompt, warm_pool
from worker.serving import RunningWorker

PULLER = WorkerId("prefill-1")
ROUTER, CONTROLLER, WORKER = (
    issuer(lambda role=role: credentials_of(role, "somebody").held.signer)  # type: ignore[misc]
    for role in (Role.ROUTER, Role.CONTROLLER, Role.WORKER)
)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Pool]:
    """Prefill-0 has the KV of a tenant's prompt in its cache."""
    async with warm_pool() as found:
        yield found


def source_of(pool: Pool) -> RunningWorker:
    return pool.workers["prefill-0"]


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


async def is_denied(source: RunningWorker, opened: pb.OpenFetch, caller: str = PULLER) -> bool:
    with pytest.raises(AccessDenied, match="cannot pull"):
        await fetched(source, opened, caller)
    assert source.runtime.bytes_sent.total() == 0
    assert source.runtime.handoffs.num_leases == 0
    return True


async def test_ticket_of_a_router_gives_its_puller_the_blocks_that_it_names(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()

    assert await fetched(source, asking(source, ROUTER(right_to(source)))) > 0


async def test_ticket_of_the_controller_gives_any_cached_blocks_but_no_handoff(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()
    ticket = CONTROLLER(right_to(source, subject=ANY_CACHED))

    assert await fetched(source, asking(source, ticket)) > 0
    source.runtime.bytes_sent.clear()
    assert await is_denied(source, asking(source, ticket, block_hashes=b"", handoff_id="ho-1"))


async def test_knowing_the_hashes_is_not_enough(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()

    assert await is_denied(source, asking(source, ""))
    assert await is_denied(source, asking(source, "not.a.ticket"))


async def test_worker_cannot_sign_a_ticket_nor_a_router_one_for_everything(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()

    assert await is_denied(source, asking(source, WORKER(right_to(source))))
    assert await is_denied(source, asking(source, WORKER(right_to(source, subject=ANY_CACHED))))
    assert await is_denied(source, asking(source, ROUTER(right_to(source, subject=ANY_CACHED))))
    assert await is_denied(source, asking(source, CONTROLLER(right_to(source))))


@pytest.mark.parametrize(
    "changes",
    [
        {"puller": WorkerId("decode-0")},
        {"source": WorkerId("prefill-1")},
        {"epoch": Epoch(7)},
        {"subject": of_blocks(b"x" * 16)},
        {"subject": of_handoff(HandoffId("ho-1"))},
    ],
)
async def test_ticket_for_another_pull_is_refused(pool: Pool, changes: dict[str, Any]) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()

    assert await is_denied(source, asking(source, ROUTER(right_to(source, **changes))))


async def test_stolen_ticket_serves_nobody_but_its_puller(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()

    assert await is_denied(source, asking(source, ROUTER(right_to(source))), caller="decode-0")


async def test_ticket_names_exactly_its_blocks_not_some_more_or_others_before(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()
    first_two = ROUTER(right_to(source, subject=of_blocks(hashes()[:32])))

    assert await is_denied(source, asking(source, first_two))
    assert await is_denied(source, asking(source, first_two, block_hashes=hashes()[16:48]))


async def test_ticket_ends_with_its_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()
    monkeypatch.setattr(tickets, "LIFETIME_S", -3600.0)

    assert await is_denied(source, asking(source, ROUTER(right_to(source))))


async def test_ticket_of_another_cluster_is_refused(pool: Pool) -> None:
    source = source_of(pool)
    source.runtime.bytes_sent.clear()
    stranger = Credentials.of(authority(is_encrypted=False), Role.ROUTER, "router-0")

    assert await is_denied(source, asking(source, issuer(lambda: stranger.held.signer)(right_to(source))))
