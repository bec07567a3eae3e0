"""Reads ahead for waiting requests: for which, in what order, for whose share, and when they end."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from common.block_hash import BlockHashes
from common.errors import WorkerLost
from common.ids import BlockHash, Epoch, HashRoot, RequestId, WorkerId
from common.kv_events import KvEvents
from kvrelay.v1 import worker_pb2
from router.choosing.offloaded import OffloadedBlocks, find_offloaded
from router.fleet.index import PrefixIndex
from router.fleet.member import Member, WorkerState
from router.line.admission import SECOND_COST
from router.line.read_ahead import MAX_OPEN, ReadAheadOutcome
from router.placement.plans import PlacementRequest
from router.tenants import Tenant
from tests.router.line import WORKER, A, B, Line, turns
from tests.router.members import make_member
from tests.router.test_index import blocks
from tests.router.test_tier_plans import BLOCK_BYTES, reading

ROOT = HashRoot(b"r" * 32)
READ_S = 0.0005
"""Time to read a block, in less than computing its one token takes."""


def tiered(worker_id: WorkerId, *, block_s: float = 0.002, num_free: int = 1000, num_blocks: int = 1000) -> Member:
    """Return a ready worker that reads a block in so many seconds, computes it in 16 ms, and has so many free pages."""
    member = make_member(worker_id=worker_id, num_blocks=num_blocks)
    assert member.facts is not None
    member.facts = replace(member.facts, block_bytes=BLOCK_BYTES)
    member.take_timing(reading(block_s))
    member.take_report(worker_pb2.LoadReport(num_free_blocks=num_free), now_s=0.0)
    member.state = WorkerState.READY
    return member


class Reads:
    """A worker that reads ahead until it is told to stop: what it was asked, and what of that it still does."""

    def __init__(self, line: Line, worker_id: WorkerId = WORKER, **pages: int) -> None:
        self.running: list[str] = []
        self.error: WorkerLost | None = None
        member = line.readers[worker_id] = tiered(worker_id, block_s=READ_S, **pages)
        member.client = cast(Any, self)
        names = [f"{tenant}{number}" for tenant in "ab" for number in range(10)]
        offloaded = BlockHashes.of(map(named, names))
        line.index.apply(worker_id, KvEvents(stored=offloaded, offloaded=offloaded))

    async def read_ahead(self, hashes: BlockHashes, root: HashRoot, epoch: Epoch, **_limits: float) -> int:
        """As `WorkerClient.read_ahead`; the hash names the request."""
        assert (root, epoch) == (ROOT, Epoch(1))
        name = hashes[0].decode()[:2]
        if self.error is not None:
            raise self.error
        self.running.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.remove(name)
        return 0


def named(name: str) -> BlockHash:
    return BlockHash((name * 8).encode())


async def come(line: Line, name: str, num_pages: int = 9, tenant: Tenant = A) -> None:
    """Let a request come that finds no room unless it is given less than there is."""
    await line.come(name, num_pages, tenant, hashes=BlockHashes.of([named(name)]), root=ROOT)
    await turns()


def count(line: Line, outcome: ReadAheadOutcome) -> float:
    labels = {"outcome": outcome.value}
    return line.metrics.registry.get_sample_value("kvrelay_reads_ahead_total", labels) or 0.0


async def test_few_reads_are_open_and_the_next_begins_when_a_request_leaves() -> None:
    line = Line(num_pages=8)
    reads = Reads(line)
    for number in range(MAX_OPEN + 2):
        await come(line, f"a{number}")
    assert reads.running == [f"a{number}" for number in range(MAX_OPEN)]
    await line.leave("a1")
    assert reads.running == ["a0", "a2", "a3", "a4"]
    assert count(line, ReadAheadOutcome.LEFT) == 1
    for number in (0, 2, 3, 4, 5):
        await line.leave(f"a{number}")
    assert reads.running == []


async def test_request_that_waits_for_nothing_has_nothing_read() -> None:
    line = Line(num_pages=8)
    reads = Reads(line)
    await come(line, "a0", num_pages=1)
    assert line.served == {"a0"}
    assert reads.running == []


async def test_read_goes_on_when_its_request_has_a_plan_there() -> None:
    line = Line(num_pages=8)
    reads = Reads(line)
    await come(line, "a0", num_pages=8)
    await come(line, "b0", num_pages=8)
    assert reads.running == ["b0"]
    await line.end("a0")
    assert line.served == {"b0"}
    assert reads.running == ["b0"]
    assert count(line, ReadAheadOutcome.USED) == 1
    assert line.waiting["b0"].result().decision.num_read_ahead_blocks == 1
    line.chooser.is_saturated = True
    await line.refuse("b0")
    assert not line.served
    assert reads.running == ["b0"], "a request that waits again has its blocks read once"


async def test_read_for_a_request_that_is_computed_elsewhere_ends() -> None:
    line = Line(num_pages=8)
    reads = Reads(line, WorkerId("d9"))
    await come(line, "a0", num_pages=8)
    await come(line, "b0", num_pages=8)
    assert reads.running == ["b0"]
    await line.end("a0")
    assert reads.running == []
    assert count(line, ReadAheadOutcome.ELSEWHERE) == 1
    assert line.waiting["b0"].result().decision.num_read_ahead_blocks == 0


async def test_tenant_with_many_waiting_requests_gets_its_part_of_the_reads() -> None:
    line = Line(num_pages=8)
    reads = Reads(line)
    for number in range(2 * MAX_OPEN):
        await come(line, f"a{number}")
    for number in range(2 * MAX_OPEN):
        await come(line, f"b{number}", tenant=B)
    assert sorted(reads.running) == ["a0", "a1", "b0", "b1"]
    assert count(line, ReadAheadOutcome.DISPLACED) == 2
    await line.leave("b0")
    assert sorted(reads.running) == ["a0", "a1", "b1", "b2"]


async def test_read_for_a_client_that_goes_away_is_charged_to_its_tenant() -> None:
    line = Line(num_pages=8)
    Reads(line)
    await come(line, "a0")
    await come(line, "b0", tenant=B)
    counters = [line.queue.counter(tenant) for tenant in "ab"]
    await line.leave("a0")
    charged = [line.queue.counter(tenant) - before for tenant, before in zip("ab", counters, strict=True)]
    assert charged == [pytest.approx(SECOND_COST * READ_S), 0]


async def test_failed_read_changes_nothing_for_its_request() -> None:
    line = Line(num_pages=8)
    reads = Reads(line)
    reads.error = WorkerLost("gone")
    await come(line, "a0", num_pages=8)
    await come(line, "b0", num_pages=8)
    await line.end("a0")
    assert line.served == {"b0"}
    assert count(line, ReadAheadOutcome.FAILED) == 1


async def test_nothing_is_read_where_the_whole_prompt_has_no_pages() -> None:
    line = Line(num_pages=8)
    reads = Reads(line, num_free=20)
    for number in range(3):
        await come(line, f"a{number}")
    assert reads.running == ["a0", "a1"]
    await line.leave("a0")
    assert reads.running == ["a1", "a2"]


async def test_open_reads_fill_a_quarter_of_the_pages_at_most() -> None:
    line = Line(num_pages=8)
    reads = Reads(line, num_blocks=8)
    for number in range(3):
        await come(line, f"a{number}")
    assert reads.running == ["a0", "a1"]


# Which worker is asked.

P0, P1 = WorkerId("p0"), WorkerId("p1")
CHAIN = blocks(*range(50))


def offloaded_at(
    held: dict[WorkerId, tuple[int, int]],
    *,
    awaited: WorkerId | None = None,
    block_s: float = 0.002,
    draining: WorkerId | None = None,
) -> OffloadedBlocks | None:
    """Return what is to be read, when workers hold so many blocks, of which so many are in pages."""
    index = PrefixIndex()
    members = {worker_id: tiered(worker_id, block_s=block_s) for worker_id in held}
    for worker_id, (num_held, num_in_pages) in held.items():
        members[worker_id].is_set_to_drain = worker_id == draining
        index.apply(worker_id, KvEvents(stored=CHAIN[:num_held], offloaded=CHAIN[num_in_pages:num_held]))
    request = PlacementRequest(request_id=RequestId("r"), num_tokens=801, block_size=16, hashes=CHAIN)
    return find_offloaded(index, members, request, awaited=awaited)


@pytest.mark.parametrize(
    ("held", "awaited", "wanted"),
    [
        ({P0: (40, 10), P1: (30, 30)}, None, (P0, 40, 30)),
        ({P0: (40, 10), P1: (40, 40)}, None, None),  # it will go to the other one, or be pulled from there
        ({P0: (40, 10), P1: (30, 20)}, P1, (P1, 30, 10)),
        ({P0: (40, 10), P1: (30, 20)}, WorkerId("p7"), (P0, 40, 30)),
        ({P0: (40, 40)}, None, None),
        ({P0: (0, 0)}, None, None),
    ],
)
def test_worker_that_is_waited_for_or_holds_most_reads_what_no_other_has_in_pages(
    held: dict[WorkerId, tuple[int, int]], awaited: WorkerId | None, wanted: tuple[WorkerId, int, int] | None
) -> None:
    found = offloaded_at(held, awaited=awaited)
    assert (None if found is None else (found.worker_id, found.num_blocks, found.num_offloaded)) == wanted


def test_blocks_that_are_computed_sooner_than_read_are_not_read_ahead() -> None:
    assert offloaded_at({P0: (40, 10)}, block_s=0.05) is None


def test_worker_that_drains_reads_nothing_ahead() -> None:
    assert offloaded_at({P0: (40, 10), P1: (30, 10)}, draining=P0) == offloaded_at({P1: (30, 10)})
