"""Handoffs under an injected clock: every end runs exactly once, every lease ends."""

import asyncio

import pytest

from common.errors import HandoffGone, InvalidRequest
from common.ids import BlockId, HandoffId
from kv_transfer.handoff import FirstToken, HandoffManifest, HandoffState, HandoffTable
from tests.clock import ManualClock

MANIFEST = HandoffManifest(
    num_tokens=6,
    num_blocks=2,
    last_block_hash=None,
    first_tokens=(FirstToken(sample_index=0, token_id=1, finished=False),),
)
ID = HandoffId("ho-1")


class Leases:
    """A table under a clock that the test moves; counts the ends of its handoffs."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.table = HandoffTable(block_size=4, lease_ttl_s=10.0, clock=self.clock)
        self.num_ends = 0

    def ended(self) -> None:
        self.num_ends += 1


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.mark.parametrize("first", ["puller", "prefill"])
def test_either_side_may_come_first(leases: Leases, first: str) -> None:
    if first == "puller":
        leases.table.attach_puller(ID)
    handoff = leases.table.begin(ID, leases.ended)
    if first == "prefill":
        assert leases.table.attach_puller(ID) is handoff
    leases.table.progress(handoff, (BlockId(3), BlockId(5)), 5)
    assert handoff.num_ready_blocks == 1, "the tail is not final before the manifest"
    leases.table.complete(handoff, MANIFEST)
    assert handoff.num_ready_blocks == 2
    leases.table.release(handoff)
    leases.table.abort(handoff, HandoffGone("late"))
    assert (leases.num_ends, leases.table.num_leases, handoff.state) == (1, 0, HandoffState.RELEASED)


def test_second_puller_and_second_prefill_are_refused(leases: Leases) -> None:
    leases.table.attach_puller(ID)
    with pytest.raises(HandoffGone):
        leases.table.attach_puller(ID)
    leases.table.begin(ID, leases.ended)
    with pytest.raises(InvalidRequest):
        leases.table.begin(ID, leases.ended)


@pytest.mark.parametrize("missing", ["puller", "prefill"])
def test_lease_expires_when_one_side_never_comes(leases: Leases, missing: str) -> None:
    if missing == "prefill":
        handoff = leases.table.attach_puller(ID)
    else:
        handoff = leases.table.begin(ID, leases.ended)
        leases.clock.advance(100.0)  # computing a long prompt is no idleness of a lease...
        leases.table.sweep()
        leases.table.complete(handoff, MANIFEST)
    leases.clock.advance(9.9)
    leases.table.sweep()
    assert leases.table.num_leases == 1
    leases.clock.advance(0.2)
    leases.table.sweep()
    assert (leases.table.num_leases, leases.table.num_expired) == (0, 1)
    with pytest.raises(HandoffGone):
        handoff.raise_if_aborted()
    assert leases.num_ends == (missing == "puller")


def test_lease_with_both_sides_present_does_not_expire_while_prefill_computes(leases: Leases) -> None:
    leases.table.attach_puller(ID)
    leases.table.begin(ID, leases.ended)
    leases.clock.advance(1000.0)
    leases.table.sweep()
    assert (leases.table.num_leases, leases.table.num_expired) == (1, 0)


async def test_abort_wakes_the_other_side_at_once(leases: Leases) -> None:
    handoff = leases.table.attach_puller(ID)
    waiter = asyncio.create_task(handoff.changed())
    await asyncio.sleep(0)
    leases.table.abort(handoff, HandoffGone("the router cancelled"))
    async with asyncio.timeout(60):
        await waiter
    with pytest.raises(HandoffGone, match="the router cancelled"):
        handoff.raise_if_aborted()


def test_prefill_that_comes_after_its_puller_went_away_is_told_and_holds_nothing(leases: Leases) -> None:
    leases.table.abort(leases.table.attach_puller(ID), HandoffGone("the puller went away"))
    with pytest.raises(HandoffGone, match="the puller went away"):
        leases.table.begin(ID, leases.ended)
    assert (leases.num_ends, leases.table.num_leases) == (0, 0)


def test_abort_before_the_prefill_is_forgotten_after_one_time_to_live(leases: Leases) -> None:
    leases.table.abort(leases.table.attach_puller(ID), HandoffGone("the puller went away"))
    leases.clock.advance(10.1)
    leases.table.sweep()
    assert leases.table.begin(ID, leases.ended).state is HandoffState.FILLING


def test_puller_that_comes_after_its_handoff_has_expired_is_refused(leases: Leases) -> None:
    handoff = leases.table.begin(ID, leases.ended)
    leases.table.complete(handoff, MANIFEST)
    leases.clock.advance(10.5)
    leases.table.sweep()
    with pytest.raises(HandoffGone, match="no puller came"):
        leases.table.attach_puller(ID)
