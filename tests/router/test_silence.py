"""Workers that stop without closing their connection: their answers go on elsewhere within about a second."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.v1 import worker_pb2
from router.fleet.member import Member, WorkerState
from router.fleet.silence import MAX_FACTOR, TICK_S, SilenceWatch
from tests.clock import ManualClock
from tests.router.cut_wire import CutWire
from tests.router.fake_worker import DECODE, PREFILL, FakeWorker, answer, trio
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster
from tests.router.members import make_member

SILENCE_S = 1.0


class Listener:
    """A watch on one ready worker that reports every 0.25 s until told otherwise."""

    def __init__(self, *, silence_s: float = SILENCE_S) -> None:
        self.clock = ManualClock(100.0)
        self.member = make_member()
        self.member.state = WorkerState.READY
        self.found: list[float] = []
        self.watch = SilenceWatch(
            members=lambda: [self.member], on_silent=self._take, clock=self.clock, silence_s=silence_s
        )
        self.hear(is_next=False)

    def _take(self, member: Member, silent_s: float) -> None:
        assert member is self.member
        self.found.append(silent_s)

    def hear(self, *, is_next: bool = True) -> None:
        self.member.take_report(worker_pb2.LoadReport(), now_s=self.clock.monotonic(), is_next=is_next)

    def pass_time(self, seconds: float) -> None:
        """Look at every tick of the time."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.watch.look()

    def talk(self, seconds: float, *, gap_s: float) -> None:
        for _ in range(round(seconds / gap_s)):
            self.pass_time(gap_s)
            self.hear()


def test_worker_that_reports_in_time_is_not_silent() -> None:
    listener = Listener()
    listener.talk(30, gap_s=0.3)
    assert not listener.found


def test_worker_is_silent_shortly_after_its_last_report() -> None:
    listener = Listener()
    listener.talk(10, gap_s=0.2)
    listener.pass_time(2)
    assert listener.found[0] == pytest.approx(SILENCE_S, abs=2 * TICK_S)


def test_worker_whose_reports_are_usually_late_is_given_more_time() -> None:
    listener = Listener()
    listener.talk(20, gap_s=0.8)
    listener.pass_time(MAX_FACTOR * SILENCE_S + 1)
    assert 2 * SILENCE_S < listener.found[0] < MAX_FACTOR * SILENCE_S


def test_one_long_pause_does_not_make_a_worker_slow_for_good() -> None:
    listener = Listener()
    listener.pass_time(60)
    listener.hear()
    listener.talk(600, gap_s=0.2)
    listener.found.clear()
    listener.pass_time(2)
    assert listener.found[0] == pytest.approx(SILENCE_S, abs=2 * TICK_S)


def test_worker_that_has_just_begun_to_report_has_time_for_its_second_report() -> None:
    listener = Listener(silence_s=SILENCE_S / 2)
    listener.pass_time(0.7)
    assert not listener.found


def test_router_that_was_stopped_itself_blames_nobody() -> None:
    listener = Listener()
    listener.talk(10, gap_s=0.2)
    listener.clock.advance(30)
    listener.watch.look()
    listener.pass_time(SILENCE_S / 2)
    assert not listener.found


async def test_silent_decode_worker_loses_its_answers_to_another() -> None:
    prefill, first, second = trio()
    first.gates.close("token 3")
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(make_request(10), first, "token 3")
        first.gates.close("update")
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [plan.decode_worker_id for plan in reply.plans] == ["d0", "d1"]
        await cluster.until(lambda _router: first.calls["cancelled"])
        first.gates.open("update")
        await cluster.until_state("d0", "ready")


async def test_request_whose_workers_fall_silent_in_turn_is_not_suspected() -> None:
    awake = [FakeWorker(f"d{number}", DECODE) for number in range(3)]
    for worker in awake:
        worker.gates.close("token 3")
    async with running_cluster(*awake, config=config_with(max_lost_workers=2)) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        for _ in range(2):
            await cluster.until(lambda _router: any(worker.num_running_calls for worker in awake))
            stopped = next(worker for worker in awake if worker.num_running_calls)
            awake.remove(stopped)
            stopped.gates.close("describe")
            stopped.gates.close("update")
        awake[0].gates.open("token 3")
        assert (await generating).token_ids() == answer(prompt_of(10), 6)


async def test_silent_prefill_worker_loses_its_prompts_to_another() -> None:
    first, second, decode = FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)
    first.gates.close("first_token")
    second.gates.close("first_token")
    async with running_cluster(first, second, decode) as cluster:
        generating = asyncio.create_task(cluster.generate(make_request(10)))
        await cluster.until(lambda _router: first.requests or second.requests)
        stuck, other = (first, second) if first.requests else (second, first)
        other.gates.open("first_token")
        stuck.gates.close("update")
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [plan.prefill_worker_id for plan in reply.plans] == [stuck.worker_id, other.worker_id]


async def test_prefill_worker_silent_after_its_first_token_ends_the_pull_from_it() -> None:
    first, second, decode = FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)
    decode.gates.close("fetch")
    async with running_cluster(first, second, decode) as cluster:
        generating = await cluster.start(make_request(10), decode, "fetch")
        await cluster.until(lambda _router: first.requests or second.requests)
        stuck, other = (first, second) if first.requests else (second, first)
        await cluster.until(lambda _router: not stuck.num_running_calls)  # it has sent the first token
        stuck.gates.close("update")
        await cluster.until(lambda router: router.num_replans)
        decode.gates.open("fetch")
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [plan.prefill_worker_id for plan in reply.plans] == [stuck.worker_id, other.worker_id]


async def test_worker_with_an_overdue_step_gets_nothing_until_it_has_ended() -> None:
    prefill, first, second = trio()
    first.gates.close("token 3")
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(make_request(10), first, "token 3")
        first.is_overdue = True
        assert (await generating).token_ids() == answer(prompt_of(10), 6)
        reply = await cluster.generate(make_request(11))
        assert [plan.decode_worker_id for plan in reply.plans] == ["d1"]
        first.is_overdue = False
        await cluster.until_state("d0", "ready")


async def test_only_worker_of_its_kind_keeps_its_answers_however_silent() -> None:
    decode = FakeWorker("d0", DECODE)
    decode.gates.close("token 3")
    async with running_cluster(decode) as cluster:
        generating = await cluster.start(make_request(10), decode, "token 3")
        decode.is_overdue = True
        decode.set_load(num_running=7)
        (member,) = cluster.router.fleet.members
        await cluster.until(lambda _router: member.report.num_running == 7)
        cluster.router.fleet.on_silent(member, 60.0)
        decode.gates.open("token 3")
        assert len((await generating).plans) == 1


@pytest.mark.parametrize("quiet_s", [0.0, 5.0])
async def test_connection_that_breaks_after_a_silence_is_no_end_of_its_worker(quiet_s: float) -> None:
    """Else a request that has failed on a worker is refused once that is cut off, as if it had ended it."""
    async with running_cluster(FakeWorker("d0", DECODE)) as cluster:
        fleet = cluster.router.fleet
        (member,) = fleet.members
        member.reported_s -= quiet_s
        fleet.on_lost(member, "the connection was lost")
        assert member.has_ended is (quiet_s == 0)
        member.reported_s -= 60.0
        fleet.on_lost(member, "the connection is refused")
        assert member.has_ended is (quiet_s == 0), "it is lost already"
        await cluster.until_state("d0", "ready")


@asynccontextmanager
async def wired_trio() -> AsyncIterator[tuple[TestCluster, FakeWorker, CutWire]]:
    """Run a `trio` whose first decode worker is reached over a wire; yields that worker and its wire, too."""
    prefill, first, second = trio()
    async with running_cluster(prefill, second) as cluster:
        cluster.workers["d0"] = await first.start()
        async with CutWire(first).running() as wire:
            await cluster.until_used([prefill.endpoint, wire.endpoint, second.endpoint])
            yield cluster, first, wire
        await first.die()


@pytest.mark.parametrize("directions", [("to_worker", "to_router"), ("to_router",)])
async def test_answers_behind_a_cut_connection_go_on_elsewhere(directions: tuple[str, ...]) -> None:
    async with wired_trio() as (cluster, first, wire):
        first.gates.close("token 3")
        generating = await cluster.start(make_request(10), first, "token 3")
        wire.cut(*directions)
        reply = await generating
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert [plan.decode_worker_id for plan in reply.plans] == ["d0", "d1"]


async def test_request_that_never_reaches_its_worker_is_sent_to_another() -> None:
    async with wired_trio() as (cluster, first, wire):
        wire.cut("to_worker")
        replies = await asyncio.gather(*(cluster.generate(make_request(10 + number)) for number in range(4)))
        assert not first.requests
        for number, reply in enumerate(replies):
            assert reply.token_ids() == answer(prompt_of(10 + number), 6)
