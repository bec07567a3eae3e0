"""The line before a full fleet, with the real chooser: what comes free is noticed, on whichever worker."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from benchmarks.router.in_process import BLOCK_SIZE, join, make_router
from common.ids import RequestId, WorkerId
from kvrelay.v1 import worker_pb2
from router.admission.ticket import QueuedRequest, Ticket
from router.parts import RouterParts
from router.placement.chooser import Search
from router.placement.plans import PlacementRequest
from router.tenants import Tenant, Terms

NEEDED_BLOCKS = 65
DECODES = [WorkerId(f"worker-{number}") for number in (1, 3, 5)]


class Fleet:
    """Three decode workers that report what a test says, and as many prefill workers."""

    def __init__(self) -> None:
        self.router: RouterParts = make_router("predictive")
        join(self.router, 6, num_blocks=10_000, num_free_blocks=0)
        for link in asyncio.all_tasks() - {asyncio.current_task()}:
            link.cancel()  # there is no worker behind it
        self.seq = 0

    def report(self, worker_id: WorkerId, *, slots: int, pages: int) -> None:
        """Let a worker with running answers report free slots and pages."""
        self.seq += 1
        load = worker_pb2.LoadReport(
            num_running=20, num_decoding=20, num_free_slots=slots, num_free_blocks=pages, num_blocks=10_000
        )
        update = worker_pb2.WatchWorkerResponse(seq=self.seq, load=load)
        self.router.fleet.on_update(self.router.fleet.members_by_id[worker_id], update)

    async def wait(self, name: str) -> "asyncio.Task[object]":
        """Let a request wait for a plan."""
        ticket = self.router.admission.admit(Tenant(name="a"), Terms())
        assert isinstance(ticket, Ticket)
        request = PlacementRequest(
            request_id=RequestId(name),
            num_tokens=(NEEDED_BLOCKS - 1) * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_output_tokens=1,
        )
        deadline_s = self.router.clock.monotonic() + 10.0
        queued = QueuedRequest(ticket=ticket, search=Search(request=request), deadline_s=deadline_s)
        waiting = asyncio.create_task(self.router.line.place(queued))
        await asyncio.sleep(0)
        assert queued.last_refusal is not None
        return waiting


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    await fleet.router.fleet.aclose()


async def test_slot_of_a_worker_with_pages_is_noticed_beside_slots_and_pages_of_others(fleet: Fleet) -> None:
    slots_alone, with_both, pages_alone = DECODES
    fleet.report(slots_alone, slots=5, pages=5)
    fleet.report(with_both, slots=0, pages=1000)
    fleet.report(pages_alone, slots=0, pages=5000)
    waiting = await fleet.wait("x")
    fleet.report(with_both, slots=1, pages=1000)
    await waiting


async def test_pages_that_come_free_during_a_rest_are_noticed_without_another_report(fleet: Fleet) -> None:
    for worker_id in DECODES:
        fleet.report(worker_id, slots=5, pages=0)
    waiting = await fleet.wait("x")
    fleet.report(DECODES[0], slots=5, pages=2 * NEEDED_BLOCKS)
    await waiting
