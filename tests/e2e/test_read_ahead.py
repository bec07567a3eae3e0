"""A request that waits in the line finds its blocks in pages: the worker reads them from its tiers meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.timing import TimingModel
from kvrelay.client import AsyncClient
from router.line.read_ahead import ReadAheadOutcome
from tests.e2e.in_process import System, running_system
from tests.e2e.test_shares import KEYS, TENANTS
from tests.worker.cluster import until_empty
from tests.worker.test_tiers import held_calls, settings, until_written
from worker.prefix_pull import PullOutcome
from worker.serving import RunningWorker

NUM_BLOCKS = 64
PROMPT = "what was said before and comes back in the next turn"
SLOW_AT = 4


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimingModel, "tier_read_s", lambda _self, _num_bytes: 0.0)


@asynccontextmanager
async def offloading_system() -> AsyncIterator[tuple[System, AsyncClient, AsyncClient]]:
    """Yield a system of one worker for one request at once, with the prompt of tenant a in its tier only."""
    async with (
        running_system(
            num_prefill=0, num_blocks=NUM_BLOCKS, max_running=1, tenants=TENANTS, tiers=settings()
        ) as system,
        system.client(api_key=KEYS["a"]) as a,
        system.client(api_key=KEYS["b"]) as b,
    ):
        await a.generate(PROMPT, max_tokens=1, ignore_eos=True)
        await until_written(worker_of(system))
        for number in range(2):
            await b.generate(f"{number}" * (4 * (NUM_BLOCKS - 8)), max_tokens=1, ignore_eos=True)
        await until_empty(worker_of(system))
        await system.until(lambda _router: system.router.door.parts.index.has_tiers)
        yield system, a, b


def worker_of(system: System) -> RunningWorker:
    return system.workers["d0"]


@asynccontextmanager
async def busy(system: System, client: AsyncClient) -> AsyncIterator[None]:
    """Let an answer of a client have the worker during the block."""
    system.pace.slow_down(at=SLOW_AT)
    async with client.stream("busy", max_tokens=40, ignore_eos=True) as events:
        await system.until(lambda router: router.num_active == 1)
        yield
        system.pace.hurry()
        await events.result()


def num_of(system: System, outcome: ReadAheadOutcome) -> float:
    registry = system.router.door.parts.metrics.registry
    return registry.get_sample_value("kvrelay_reads_ahead_total", {"outcome": outcome.value}) or 0.0


async def test_waiting_request_finds_its_blocks_in_pages_and_only_its_own_tenants() -> None:
    async with offloading_system() as (system, a, b):
        ahead = worker_of(system).runtime.read_ahead
        async with busy(system, b):
            other = asyncio.create_task(b.generate(PROMPT, max_tokens=1, ignore_eos=True))
            await system.until(lambda router: router.num_queued == 1)
        assert (await other).usage.num_cached_tokens == 0
        assert not ahead.outcomes
        async with busy(system, a):
            waiting = asyncio.create_task(a.generate(PROMPT, max_tokens=1, ignore_eos=True))
            await system.until(lambda router: ahead.outcomes)
            assert not waiting.done()
            assert worker_of(system).runtime.prefixes.tier_outcomes == {}
        num_cached = (await waiting).usage.num_cached_tokens
        assert num_cached >= len(PROMPT) - 8
        assert worker_of(system).runtime.prefixes.tier_outcomes == {}
        assert ahead.outcomes == {PullOutcome.PULLED: 1}
        assert (ahead.blocks.num_used, ahead.blocks.num_wasted) == (num_cached // 4, 0)
        assert num_of(system, ReadAheadOutcome.USED) == 1
        await system.until_idle()


async def test_client_that_goes_away_ends_the_read_for_its_request() -> None:
    async with offloading_system() as (system, a, _b):
        worker = worker_of(system)
        assert worker.runtime.tiers is not None
        async with busy(system, a):
            with held_calls(worker.runtime.tiers.tiers, "get"):
                waiting = asyncio.create_task(a.generate(PROMPT, max_tokens=1, ignore_eos=True))
                await system.until(lambda _router: worker.runtime.num_request_tasks == 2)
                waiting.cancel()
                await system.until(lambda _router: worker.runtime.read_ahead.outcomes)
        assert worker.runtime.read_ahead.outcomes == {PullOutcome.CANCELLED: 1}
        assert num_of(system, ReadAheadOutcome.LEFT) == 1
        await system.until_idle()
