"""Parts of a generator process: alarm, delays, messages, counts, and the process itself."""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from common.slo import Slo
from measure.load.alarm import Alarm, KernelAlarm, LoopAlarm
from measure.load.crew import GeneratorProcess
from measure.load.player import RequestTerms
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.load.selfcheck import BEAT_S, LoopMeter
from measure.load.sending import settled
from measure.load.targets.interface import Feature, TargetSpec
from measure.load.wire import GeneratorOrder, Unpacker, from_wire, pack, to_wire
from measure.simulate.loop import VirtualClock, VirtualLoop
from measure.workload.sessions import Content, Session
from tests.measure.load.made_runs import make_request
from tests.measure.load.virtual import VirtualAlarm, in_virtual_time
from tests.measure.load.workloads import session

ALARMS = [
    pytest.param(KernelAlarm, marks=pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")),
    lambda: LoopAlarm(SystemClock()),
]


@pytest.mark.parametrize("make", ALARMS)
async def test_alarm_wakes_every_task_and_never_early(make: Callable[[], Alarm]) -> None:
    alarm, now_s, woken = make(), time.monotonic(), []

    async def sleeper(after_s: float) -> None:
        await alarm.until(now_s + after_s)
        assert time.monotonic() >= now_s + after_s
        woken.append(after_s)

    times = [0.009, 0.001, 0.005, -1.0, 0.0011]
    async with asyncio.timeout(60):
        await asyncio.gather(*map(sleeper, times))
    alarm.close()
    assert sorted(woken) == sorted(times)


@pytest.mark.parametrize("make", ALARMS)
async def test_alarm_when_the_next_sleeper_is_cancelled_wakes_the_others(make: Callable[[], Alarm]) -> None:
    alarm, now_s = make(), time.monotonic()
    first = asyncio.ensure_future(alarm.until(now_s + 1.0))
    second = asyncio.ensure_future(alarm.until(now_s + 1.1))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(60):
        await second
    assert first.cancelled()
    alarm.close()


def test_loop_meter_counts_a_stall_for_every_beat_that_it_swallowed() -> None:
    class StallingAlarm(VirtualAlarm):
        async def until(self, when_s: float) -> None:
            stalls = when_s == pytest.approx(3 * BEAT_S)
            await super().until(when_s + 4 * BEAT_S if stalls else when_s)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        meter = LoopMeter(StallingAlarm(), VirtualClock(loop))
        task = asyncio.ensure_future(meter.run())
        await asyncio.sleep(8.5 * BEAT_S)
        task.cancel()
        return meter.take()

    lags = in_virtual_time(main)
    assert lags == pytest.approx([0, 0, 4 * BEAT_S, 3 * BEAT_S, 2 * BEAT_S, BEAT_S, 0, 0], abs=1e-9)


@pytest.mark.parametrize(
    ("counts", "num_counted", "expected"),
    [
        ([1, 1, 1], None, (1, 1, 1)),
        ([1, 1, 1], 3, (1, 1, 1)),
        ([1, 1, 1], 8, (3, 3, 2)),
        ([1, 1, 1], 2, (1, 1, 0)),
        ([], 5, ()),
    ],
)
def test_settled_spreads_the_servers_count_over_the_pieces(
    counts: list[int], num_counted: int | None, expected: tuple[int, ...]
) -> None:
    assert settled(counts, num_counted) == expected


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_messages_are_the_same_wherever_the_pipe_cuts_them(cuts: list[int]) -> None:
    stream = (
        pack(GeneratorOrder.PLAY, to_wire(session(3, turns=2)))
        + pack(GeneratorOrder.STOP)
        + pack(GeneratorOrder.MOVE_PLACES, 1, 4)
    )
    unpacker, edges = Unpacker(), [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [m for begin, end in itertools.pairwise(edges) for m in unpacker.feed(stream[begin:end])]
    assert [message[0] for message in found] == [GeneratorOrder.PLAY, GeneratorOrder.STOP, GeneratorOrder.MOVE_PLACES]
    assert from_wire(Session, found[0][1]) == session(3, turns=2)


def test_records_terms_and_targets_survive_the_pipe() -> None:
    def through(value: object) -> dict[str, object]:
        (message,) = Unpacker().feed(pack(GeneratorOrder.BEGIN, value))
        return message[1]  # type: ignore[no-any-return]

    ended = make_request(gaps_s=[0.01] * 3, outcome=Outcome.REFUSED, server=ServerReport(queue_s=0.5, transport="shm"))
    assert from_wire(RequestRecord, through(to_wire(ended))) == ended
    terms = RequestTerms(
        content=Content.CHAT, seed=3, origin_s=1.5, duration_s=9.0, timeout_s=5.0, slo=Slo(ttft_s=1.0, tpot_s=0.1)
    )
    assert from_wire(RequestTerms, through(to_wire(terms))) == terms
    target = TargetSpec(url="http://host/v1", model="m", features=(Feature.IGNORE_EOS,))
    assert from_wire(TargetSpec, through(to_wire(target))) == target


async def test_generator_process_does_not_get_the_terminals_ctrl_c() -> None:
    process = await GeneratorProcess.start(0)
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
    finally:
        process.kill()
        await process.wait()


async def test_kill_keeps_the_exit_code_for_the_description() -> None:
    process = await GeneratorProcess.start(3)

    process.kill()

    assert await process.epitaph() == "generator process 3 was killed by signal 9"
