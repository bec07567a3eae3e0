"""The live page's fifteen minutes of throughput and latency."""

from kvrelay.v1 import sampling_pb2
from router.observe.history import INTERVAL_S, NUM_POINTS, History
from router.observe.in_flight import InFlight
from router.observe.recent_requests import RecentRequests
from router.record.record import RunningRequest
from tests.clock import ManualClock
from tests.router.test_lengths import make_record


class Served:
    """Requests of a router on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.in_flight, self.recent = InFlight(self.clock), RecentRequests(self.clock)
        self.history = History(in_flight=self.in_flight, recent=self.recent, clock=self.clock)

    def request(self) -> RunningRequest:
        return make_record(self.clock, num_blocks=1)

    def answer(self, *, ttft_s: float, tpot_s: float) -> None:
        record = self.request()
        with self.in_flight.following(record):
            self.clock.advance(ttft_s)
            deliver(record, 0, 1)
            self.clock.advance(tpot_s)
            deliver(record, 1, 1)
            self.recent.note(record)


def deliver(record: RunningRequest, first: int, count: int) -> None:
    runs = [sampling_pb2.TokenRun(first_token_index=first, tokens=bytes(4 * count))]
    record.ledger.accept_runs(runs, expected=range(1))


def test_tokens_of_an_answer_that_still_runs_count_when_they_come() -> None:
    served = Served()
    record = served.request()
    with served.in_flight.following(record):
        for first in (0, 50):
            served.clock.advance(INTERVAL_S)
            deliver(record, first, 50)
            served.history.add_point()
    served.clock.advance(INTERVAL_S)
    served.history.add_point()
    assert [point.output_tokens_per_s for point in served.history.points] == [10.0, 10.0, 0.0]
    assert {(point.requests_per_s, point.ttft_p50_s) for point in served.history.points} == {(0.0, None)}


def test_times_are_those_of_the_answers_that_ended_in_the_interval() -> None:
    served = Served()
    for _ in range(9):
        served.answer(ttft_s=0.25, tpot_s=0.125)
    served.answer(ttft_s=1.0, tpot_s=0.5)
    served.clock.advance(0.125)
    served.history.add_point()
    (point,) = served.history.points
    assert point.requests_per_s == 10 / 5.0
    assert (point.ttft_p50_s, point.ttft_p95_s) == (0.25, 1.0)
    assert (point.tpot_p50_s, point.tpot_p95_s) == (0.125, 0.5)
    served.clock.advance(INTERVAL_S)
    served.history.add_point()
    assert served.history.points[-1].requests_per_s == 0.0


def test_history_keeps_fifteen_minutes_and_no_more() -> None:
    served = Served()
    for _ in range(NUM_POINTS + 20):
        served.clock.advance(INTERVAL_S)
        served.history.add_point()
    assert served.clock.monotonic() - served.history.points[0].ended_s == 15 * 60 - INTERVAL_S
