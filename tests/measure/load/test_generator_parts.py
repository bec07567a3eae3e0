"""Parts of a generator process: waits, delays, messages, counts, and the process itself."""

import asyncio
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from common.slo import Slo
from measure.load.generators import GeneratorProcess
from measure.load.player import RequestTerms
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.load.selfcheck import BEAT_S, SelfMeter
from measure.load.sending import settled, until
from measure.load.targets.interface import Feature, TargetSpec
from measure.load.wire import GeneratorOrder, Unpacker, from_wire, pack, to_wire
from measure.simulate.loop import VirtualClock, VirtualLoop
from measure.workload.sessions import Content, Session
from tests.measure.load.made_runs import make_request
from tests.measure.load.virtual import in_virtual_time
from tests.measure.load.workloads import session


async def test_wait_ends_at_its_time_and_never_before_it() -> None:
    clock = SystemClock()
    for after_s in (-1.0, 0.0011, 0.005):
        when_s = clock.monotonic() + after_s
        await until(when_s, clock)
        assert clock.monotonic() >= when_s


def test_loop_meter_counts_a_stall_for_every_beat_that_it_swallowed() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, stalls_s = VirtualClock(loop), [0.0]

        class Stalling:
            """A clock that jumps on when the third beat is due."""

            def monotonic(self) -> float:
                if clock.monotonic() == pytest.approx(3 * BEAT_S):
                    stalls_s[0] = 4 * BEAT_S
                return clock.monotonic() + stalls_s[0]

        meter = SelfMeter(Stalling())
        task = asyncio.ensure_future(meter.run())
        await asyncio.sleep(4.5 * BEAT_S)
        task.cancel()
        return meter.take().loop_lags_s

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
        + pack(GeneratorOrder.FINISH)
    )
    unpacker, edges = Unpacker(), [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [m for begin, end in itertools.pairwise(edges) for m in unpacker.feed(stream[begin:end])]
    assert [message[0] for message in found] == [GeneratorOrder.PLAY, GeneratorOrder.STOP, GeneratorOrder.FINISH]
    assert from_wire(Session, found[0][1]) == session(3, turns=2)


def test_records_terms_and_targets_survive_the_pipe() -> None:
    def through(value: object) -> dict[str, object]:
        (message,) = Unpacker().feed(pack(GeneratorOrder.BEGIN, value))
        return message[1]  # type: ignore[no-any-return]

    ended = make_request(gaps_s=[0.01] * 3, outcome=Outcome.REFUSED, server=ServerReport(queue_s=0.5, transport="shm"))
    assert from_wire(RequestRecord, through(to_wire(ended))) == ended
    terms = RequestTerms(content=Content.CHAT, seed=3, origin_s=1.5, timeout_s=5.0, slo=Slo(ttft_s=1.0, tpot_s=0.1))
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

    assert await process.ending() == "generator process 3 was killed by signal 9"
