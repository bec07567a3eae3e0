"""Cached blocks that travel, against a vLLM of the tests' own: what is granted comes back, in every order of events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.block_hash import PrefixTokens
from common.errors import Refused
from common.ids import BlockId
from engine.events import EngineEvent, Started
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.landing import Landing, Pinned
from engine.vllm.cache_mirror import salt_of
from engine.vllm.driver import VllmDriver
from engine.vllm.errands import BlocksStored, Staged
from tests.builders import make_request
from tests.engine.vllm.fake_vllm import BLOCK_SIZE, FakeVllm, step

NAMES = tuple(bytes((i,)) * 32 for i in range(4))


def request(num_tokens: int = 18, **changes: Any) -> EngineRequest:
    return make_request(range(1, num_tokens + 1), block_size=BLOCK_SIZE, **changes)


def ignore(_event: EngineEvent) -> None:
    pass


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(num_ranks=2)
    yield fake
    assert not fake.faults
    await fake.aclose()


def driver_of(vllm: FakeVllm) -> VllmDriver:
    setup: Any = None
    return VllmDriver(vllm.engine, setup)


async def cache(vllm: FakeVllm, num_blocks: int) -> None:
    """Let vLLM have the leading blocks of `request()` in its cache."""
    told = request()
    stored = BlocksStored(
        hashes=NAMES[:num_blocks],
        parent=None,
        salt=salt_of(told.hash_root),
        token_ids=tuple(told.prompt_token_ids[: num_blocks * BLOCK_SIZE]),
    )
    await vllm.report(step(changes=(stored,)))


def land(vllm: FakeVllm, num_blocks: int = 4, *, num_verified: int | None = None) -> Landing:
    """Return a landing for leading blocks of `request()`, with some that a pull has brought."""
    landing = vllm.engine.arrive(request().block_hashes[:num_blocks])
    assert vllm.engine.landings.reserve(landing) is None
    if num_verified is not None:
        vllm.engine.landings.commit(landing, num_verified)
    return landing


def granted(group: Group | Refused) -> Group:
    assert isinstance(group, Group), group
    return group


async def test_pinned_blocks_are_those_that_vllm_still_has_and_ask_it_for_no_page(vllm: FakeVllm) -> None:
    await cache(vllm, 4)
    pinning = asyncio.create_task(driver_of(vllm).pin(request().block_hashes))
    await vllm.settle()
    (spec,) = vllm.client.specs.values()
    assert spec.errand.exports == NAMES
    await vllm.report(Staged(rank=0, key=1, num_tokens=8))
    assert not pinning.done(), "the other rank's heads are missing"
    await vllm.report(Staged(rank=1, key=1, num_tokens=8))
    pinned = await pinning
    assert pinned.block_ids == spec.errand.slots[:2]
    assert pinned.prefix is not None
    assert pinned.prefix.matches(request().block_hashes[:2], block_size=BLOCK_SIZE)
    assert vllm.kv.num_blocks - vllm.kv.num_free == 2
    assert vllm.engine.load().num_used_blocks == 0
    await vllm.settle()
    assert vllm.client.ended == [1], "vLLM would wait for it"
    vllm.engine.landings.unpin(pinned)
    await vllm.close(1)
    assert vllm.is_empty


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_puller_that_leaves_while_blocks_are_copied_leaves_no_slot(vllm: FakeVllm, is_taken: bool) -> None:
    await cache(vllm, 4)
    pinning = asyncio.create_task(driver_of(vllm).pin(request().block_hashes))
    await vllm.settle()
    pinning.cancel()
    await vllm.settle()
    assert not vllm.is_empty, "ranks may still write"
    if is_taken:
        await vllm.stage(1, 16)
        await vllm.close(1)
    else:
        vllm.client.refuse(1)
        await vllm.settle()
    assert vllm.is_empty


async def test_blocks_that_nobody_has_cached_are_not_asked_of_vllm(vllm: FakeVllm) -> None:
    assert await driver_of(vllm).pin(request().block_hashes) == Pinned()
    assert not vllm.client.specs


async def test_a_pulled_prefix_enters_with_its_request_and_its_slots_are_free_once_loaded(vllm: FakeVllm) -> None:
    await cache(vllm, 1)
    landing = land(vllm, num_verified=3)
    assert (landing.num_cached_blocks, landing.num_missing_blocks) == (1, 3)
    events: list[EngineEvent] = []
    granted(vllm.engine.add(request(max_tokens=1), events.append, landing))
    await vllm.settle()
    errand = vllm.client.specs[1].errand
    assert (errand.num_loaded, errand.num_presumed, len(errand.slots)) == (12, 4, 3)
    await vllm.report(step(started=((1, 12),)))
    (started,) = events
    assert isinstance(started, Started)
    assert (started.num_cached_tokens, started.num_pulled_tokens) == (12, 8)
    await vllm.report(Staged(rank=0, key=1, num_tokens=12))
    assert vllm.kv.num_free < vllm.kv.num_blocks
    await vllm.report(Staged(rank=1, key=1, num_tokens=12))
    assert vllm.kv.num_free == vllm.kv.num_blocks
    vllm.client.say(1, 7, end="length")
    await vllm.close(1)
    assert vllm.is_empty


async def test_a_prompt_for_a_puller_keeps_its_slots_when_its_own_prefix_is_loaded(vllm: FakeVllm) -> None:
    """A rank may store the rest before another one has loaded."""
    group = granted(vllm.engine.add_prefill_only(request(), ignore, land(vllm, num_verified=4)))
    await vllm.settle()
    assert len(vllm.client.specs[1].errand.slots) == 5
    await vllm.report(Staged(rank=0, key=1, num_tokens=16), Staged(rank=0, key=1, num_tokens=18))
    await vllm.report(Staged(rank=1, key=1, num_tokens=16), Staged(rank=1, key=1, num_tokens=18))
    assert vllm.kv.num_blocks - vllm.kv.num_free == 5
    vllm.client.say(1, 7, end="length")
    await vllm.close(1)
    vllm.engine.cancel(group)
    assert vllm.is_empty


async def test_a_prefix_that_comes_with_another_request_is_not_pulled_again(vllm: FakeVllm) -> None:
    first = land(vllm, num_verified=4)
    assert land(vllm).num_missing_blocks == 0, "before it enters"
    group = granted(vllm.engine.add(request(), ignore, first))
    assert land(vllm).num_missing_blocks == 0, "before it starts"
    vllm.engine.cancel(group)
    await vllm.settle()
    later = land(vllm)
    assert later.num_missing_blocks == 4
    vllm.engine.landings.release(later)
    assert vllm.is_empty


@pytest.mark.parametrize("are_told", [True, False])
async def test_blocks_that_no_request_waits_for_enter_if_their_tokens_are_told(vllm: FakeVllm, are_told: bool) -> None:
    """Two pages of 16 are empty."""
    running = granted(vllm.engine.add(request(55, salt="running"), ignore))
    whole = request()
    landing, landings = vllm.engine.arrive(whole.block_hashes), vllm.engine.landings
    assert landings.reserve_below(landing, (1.0,) * 4, 9) is None
    assert len(landing.hashes) == 2
    tokens = PrefixTokens(token_ids=whole.prompt_token_ids[: 2 * BLOCK_SIZE], root=whole.hash_root)
    landings.commit(landing, 2, tokens if are_told else None)
    assert landings.mark_reused(landing, 2) == (2 if are_told else 0)
    landings.release(landing)
    vllm.engine.cancel(running)
    await vllm.settle()
    if are_told:
        (spec,) = vllm.client.specs.values()
        assert (spec.errand.num_loaded, len(spec.token_ids), spec.max_new_tokens) == (8, 9, 1)
        await vllm.stage(2, 8)
        vllm.client.say(2, 7, end="length")
        await vllm.close(2)
    assert vllm.is_empty


async def test_the_first_in_line_takes_the_slots_that_were_pulled_for_later_ones() -> None:
    """Three requests of a vLLM with one place have 12 of 16 slots; the first in line needs 8."""
    vllm = FakeVllm(max_running=1)
    running = granted(vllm.engine.add(request(4, salt="running"), ignore))
    await vllm.settle()
    first = granted(vllm.engine.add_prefill_only(request(32, salt="first"), ignore))
    landing = land(vllm, num_verified=4)
    later = granted(vllm.engine.add(request(), ignore, landing))
    held: tuple[BlockId, ...] = vllm.kv.take(8)
    vllm.engine.cancel(running)
    await vllm.settle()
    await vllm.close(1)
    assert len(vllm.client.specs[2].errand.slots) == 8
    for group in (first, later):
        vllm.engine.cancel(group)
    await vllm.settle()
    await vllm.close(2)
    vllm.kv.free(held)
    assert vllm.is_empty
    await vllm.aclose()


async def test_forgetting_names_what_vllm_keeps_of_a_tenant(vllm: FakeVllm) -> None:
    await cache(vllm, 2)
    assert "restart this worker" in vllm.engine.forget(request().hash_root).obstacle
    assert vllm.engine.forget(request(salt="other").hash_root).obstacle == ""
