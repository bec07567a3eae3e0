"""Members of a fleet without their workers, and bookings on them."""

from typing import cast

from common.ids import Epoch, RequestId, WorkerId
from kvrelay.v1 import worker_pb2
from router.fleet.booking import WorkerBooking
from router.fleet.facts import WorkerEndpoint, WorkerFacts
from router.fleet.member import Member
from router.fleet.worker_client import WorkerClient
from tests.router.fake_worker import BLOCK_SIZE, DECODE


def make_facts(*, num_blocks: int, epoch: int = 1) -> WorkerFacts:
    return WorkerFacts(
        worker_id=WorkerId("d0"),
        epoch=Epoch(epoch),
        role=DECODE,
        model_name="fake",
        fingerprint="fake-model",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        vocab_size=256,
        max_model_len=200,
        hash_probe=b"",
    )


def make_member(
    *, num_blocks: int = 10, worker_id: str = "d0", role: "worker_pb2.WorkerRole.ValueType" = DECODE
) -> Member:
    endpoint = WorkerEndpoint(worker_id=WorkerId(worker_id), role=role, address="127.0.0.1:1")
    member = Member(endpoint=endpoint, client=cast("WorkerClient", None))  # a load is reckoned without the worker
    member.begin_life(make_facts(num_blocks=num_blocks))
    return member


def book(
    member: Member, *, num_blocks: int = 4, now_s: float = 0.0, request_id: str = "r0", **work: float
) -> WorkerBooking:
    assert member.facts is not None
    booking = WorkerBooking(
        member=member,
        epoch=member.facts.epoch,
        request_id=RequestId(request_id),
        num_blocks=num_blocks,
        booked_s=now_s,
        load_version=member.load_version,
        **work,  # type: ignore[arg-type]
    )
    member.add_booking(booking)
    return booking
