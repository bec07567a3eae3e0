"""Pages from one process to another over transport grpc."""

import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from benchmarks.figures import Figures
from benchmarks.tls_cost.arms import OFF, ON, SETTINGS, cpu_s, turns
from benchmarks.tls_cost.kv_source import EPOCH, SHAPE, Pages
from benchmarks.trust import running_child
from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import BlockId, WorkerId, mint_handoff_id
from common.trust.authority import Authority
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.tickets import IssueTicket, PullRight, of_handoff
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.wanted import WantedHandoff

_SOURCE, _SINK = WorkerId("source"), WorkerId("sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The process that serves, and how this one pulls from it."""

    source_pid: int
    num_pages: int
    channel: grpc.aio.Channel
    issue: IssueTicket


async def measure_kv(figures: Figures, *, num_rounds: int, num_pages: int, window_s: float) -> None:
    """Pull all pages again and again."""
    pages = Pages(num_pages)
    puller = KvPuller(
        store=pages,
        transports=WorkerTransports.configured(TransferConfig(transports=("grpc",)), pages),
        clock=SystemClock(),
        on_bytes=lambda _transport, _count: None,
        on_pull=lambda _peer, _transport, _count, _seconds: None,
    )
    async with AsyncExitStack() as stack:
        pairs = {arm: await _start(stack, arm, num_pages) for arm in (OFF, ON)}
        for number, arm in turns(num_rounds):
            measured = await _window(puller, pairs[arm], window_s)
            if number:
                figures.add("kv", f"{num_pages} pages of {SHAPE.block_bytes >> 10} KiB", arm, **measured)


async def _start(stack: AsyncExitStack, arm: str, num_pages: int) -> _Pair:
    authority = Authority.new(SETTINGS[arm])
    command = ("benchmarks.tls_cost.kv_source", str(num_pages))
    source = await stack.enter_async_context(running_child(authority, *command, role=Role.WORKER, name=_SOURCE))
    connect = Reach.of(Credentials.of(authority, Role.WORKER, _SINK)).worker
    channel = await stack.enter_async_context(connect(source.ready.address))
    router = Reach.of(Credentials.of(authority, Role.ROUTER, "router-0"))
    return _Pair(source_pid=source.pid, num_pages=num_pages, channel=channel, issue=router.issue)


async def _window(puller: KvPuller, pair: _Pair, window_s: float) -> dict[str, float]:
    pids = (pair.source_pid, os.getpid())
    before_s, started_s, num_pulls = [cpu_s(pid) for pid in pids], time.perf_counter(), 0
    while time.perf_counter() - started_s < window_s:
        await _pull(puller, pair)
        num_pulls += 1
    wall_s, after_s = time.perf_counter() - started_s, [cpu_s(pid) for pid in pids]
    gib = num_pulls * pair.num_pages * SHAPE.block_bytes / (1 << 30)
    source_s, sink_s = (after - before for after, before in zip(after_s, before_s, strict=True))
    return {
        "MiB_per_s": gib * 1024 / wall_s,
        "source_CPU_s_per_GiB": source_s / gib,
        "sink_CPU_s_per_GiB": sink_s / gib,
    }


async def _pull(puller: KvPuller, pair: _Pair) -> None:
    handoff_id = mint_handoff_id()
    ticket = pair.issue(PullRight(puller=_SINK, source=_SOURCE, epoch=EPOCH, subject=of_handoff(handoff_id)))
    plan = PullPlan(
        peer=_SOURCE,
        epoch=EPOCH,
        wanted=WantedHandoff(
            handoff_id=handoff_id,
            num_tokens=pair.num_pages * SHAPE.block_size,
            num_blocks=pair.num_pages,
            last_block_hash=None,
            num_samples=1,
            first_sample_index=0,
        ),
        block_table=tuple(map(BlockId, range(pair.num_pages))),
        first_block=0,
        ticket=ticket,
    )
    pulled = await puller.pull(plan, pair.channel)
    assert pulled.num_blocks == pair.num_pages, pulled
