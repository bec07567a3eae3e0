"""The load of a worker in the router: lagging reports plus bookings, with every request counted once."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.v1 import worker_pb2
from router.fleet.booking import WorkerBooking
from router.fleet.member import SETTLE_S, Member
from tests.clock import ManualClock
from tests.router.fake_worker import BLOCK_SIZE, DECODE, PREFILL
from tests.router.members import book, make_facts, make_member


def prompt_tokens(member: Member) -> tuple[int, int, int]:
    load = member.load()
    return load.num_pending_prefill_tokens, load.num_active_prefill_tokens, load.num_active_missing_tokens


def test_load_counts_a_booking_until_the_worker_says_that_its_report_includes_it() -> None:
    member = make_member()
    member.take_report(worker_pb2.LoadReport(num_running=1, num_free_blocks=6), now_s=0.0)
    book(member, num_blocks=4)
    assert (member.load().num_free_blocks, member.load().num_sequences) == (2, 2)
    # This report was on its way before the worker took the request.
    member.take_report(worker_pb2.LoadReport(num_running=1, num_free_blocks=6), ["other"], now_s=0.01)
    assert member.load().num_free_blocks == 2
    member.take_report(worker_pb2.LoadReport(num_running=2, num_free_blocks=2), ["r0"], now_s=0.02)
    assert (member.load().num_free_blocks, member.load().num_sequences) == (2, 2)


def test_pages_kept_for_answers_grow_with_the_root_of_their_number() -> None:
    member = make_member()
    assert member.load().num_growth_blocks == 0
    bookings = [
        book(member, request_id=f"r{n}", num_decodes=1, num_growth_blocks=growth) for n, growth in enumerate([1, 5])
    ]
    assert member.load().num_growth_blocks == pytest.approx(3 * math.sqrt(2))
    assert member.load().num_answer_tokens == 3 * BLOCK_SIZE
    # Answers of other routers, which only the report counts, grow like this router's.
    member.take_report(worker_pb2.LoadReport(num_running=9), ["r0", "r1"], now_s=0.0)
    assert member.load().num_growth_blocks == pytest.approx(9)
    for booking in bookings:
        member.remove_booking(booking)
    assert member.load().num_growth_blocks == 0


def test_booking_takes_free_slots_and_its_objective_counts_while_it_lasts() -> None:
    member = make_member()
    assert (member.load().num_free_slots, member.load().tpot_slos) == (math.inf, ())  # it has not told its limit
    member.take_report(worker_pb2.LoadReport(num_free_slots=3, num_free_blocks=9), now_s=0.0)
    bookings = [book(member, num_decodes=2, tpot_slo_s=slo_s) for slo_s in (0.05, 0.05, math.inf)]
    assert (member.load().num_free_slots, member.load().tpot_slos) == (0, (0.05,))
    member.remove_booking(bookings[0])
    assert (member.load().num_free_slots, member.load().tpot_slos) == (0, (0.05,))
    member.remove_booking(bookings[1])
    assert (member.load().num_free_slots, member.load().tpot_slos) == (1, ())


def test_load_counts_no_booking_for_long_without_a_word() -> None:
    member = make_member()
    book(member, num_blocks=4)
    member.take_report(worker_pb2.LoadReport(num_waiting=1, num_free_blocks=5), now_s=SETTLE_S)
    assert member.load().num_free_blocks == 5


def test_new_epoch_voids_the_bookings_of_the_old_one() -> None:
    member = make_member()
    booking = book(member)
    member.begin_life(make_facts(num_blocks=10, epoch=2))
    member.take_report(worker_pb2.LoadReport(num_free_blocks=10), now_s=0.0)
    load = member.load()
    assert (load.num_free_blocks, load.num_active_blocks, member.num_users) == (10, 0, 1)
    member.note_prefilled(booking)
    member.remove_booking(booking)
    assert (member.load().num_active_blocks, member.num_users) == (0, 0)


def test_prefill_wait_is_backlog_and_bookings_and_passes_with_time() -> None:
    member = make_member()
    member.take_report(worker_pb2.LoadReport(prefill_backlog_s=2.0), now_s=10.0)
    book(member, now_s=10.5, prefill_s=1.0, num_prompt_tokens=8, num_missing_tokens=8)
    assert [member.load().prefill_wait_s(now_s) for now_s in (10.5, 11.0, 14.0)] == [2.5, 2.0, 0.0]


def test_prefill_wait_of_a_booking_on_an_idle_worker_runs_from_the_booking() -> None:
    member = make_member()
    member.take_report(worker_pb2.LoadReport(), now_s=10.0)
    book(member, now_s=50.0, prefill_s=1.0)
    assert member.load().prefill_wait_s(50.25) == 0.75


def test_first_token_ends_the_prefill_of_a_booking_that_no_report_has_shown() -> None:
    member = make_member()
    booking = book(member, now_s=1.0, prefill_s=5.0, num_prompt_tokens=8, num_missing_tokens=6)
    assert prompt_tokens(member) == (6, 8, 6)
    for _ in range(2):
        member.note_prefilled(booking)
    assert prompt_tokens(member) == (0, 0, 0)
    assert (member.load().prefill_wait_s(1.0), member.load().num_active_requests) == (0.0, 1)


@pytest.mark.parametrize(("role", "num_decodes"), [(DECODE, 6), (PREFILL, 0)])
def test_every_sequence_on_a_decode_worker_counts_as_decoding(
    role: "worker_pb2.WorkerRole.ValueType", num_decodes: int
) -> None:
    member = make_member(role=role)
    report = worker_pb2.LoadReport(num_running=3, num_waiting=1, num_reserved=2, num_decoding=1)
    member.take_report(report, now_s=0.0)
    assert member.load().num_decodes == num_decodes


@dataclass
class _Report:
    counted: frozenset[int]
    accepted: list[str]


@dataclass
class _Worker:
    """The worker's side: its requests, and the reports in its stream of updates."""

    held: set[int] = field(default_factory=set)
    news: list[str] = field(default_factory=list)
    stream: list[_Report] = field(default_factory=list)


_NUM_REQUESTS = 10
_NUM_BLOCKS = 4**_NUM_REQUESTS


@settings(max_examples=30, stateful_step_count=40, deadline=None)
class LaggingReports(RuleBasedStateMachine):
    """Request i occupies 4**i pages, so that the pages of a load tell how often each is counted."""

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.member = make_member(num_blocks=_NUM_BLOCKS)
        self.member.take_report(worker_pb2.LoadReport(num_free_blocks=_NUM_BLOCKS), now_s=0.0)
        self.worker = _Worker()
        self.bookings: dict[int, WorkerBooking] = {}
        self.num_booked = 0

    @precondition(lambda self: self.num_booked < _NUM_REQUESTS)
    @rule(num_missing=st.integers(1, 9))
    def book(self, num_missing: int) -> None:
        i = self.num_booked
        self.num_booked += 1
        self.bookings[i] = book(
            self.member,
            num_blocks=4**i,
            now_s=self.clock.monotonic(),
            request_id=f"r{i}",
            num_prompt_tokens=10,
            num_missing_tokens=num_missing,
        )

    @precondition(lambda self: self.bookings.keys() - self.worker.held)
    @rule(data=st.data())
    def worker_accepts(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.bookings.keys() - self.worker.held)))
        if f"r{i}" not in self.worker.news and not any(f"r{i}" in r.accepted for r in self.worker.stream):
            self.worker.held.add(i)
            self.worker.news.append(f"r{i}")

    @rule()
    def worker_reports(self) -> None:
        self.worker.stream.append(_Report(frozenset(self.worker.held), self.worker.news))
        self.worker.news = []

    @precondition(lambda self: self.worker.stream)
    @rule()
    def report_arrives(self) -> None:
        report = self.worker.stream.pop(0)
        num_free = _NUM_BLOCKS - sum(4**i for i in report.counted)
        self.member.take_report(
            worker_pb2.LoadReport(num_free_blocks=num_free, num_running=len(report.counted)),
            report.accepted,
            now_s=self.clock.monotonic(),
        )

    @rule(seconds=st.floats(0, SETTLE_S / 64))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.bookings)
    @rule(data=st.data())
    def first_token_comes(self, data: st.DataObject) -> None:
        self.member.note_prefilled(self.bookings[data.draw(st.sampled_from(sorted(self.bookings)))])

    @precondition(lambda self: self.bookings)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.bookings)))
        self.member.remove_booking(self.bookings.pop(i))
        self.worker.held.discard(i)

    @invariant()
    def each_running_request_is_counted_once_and_no_other_twice(self) -> None:
        counted = _NUM_BLOCKS - self.member.load().num_free_blocks
        for i in range(_NUM_REQUESTS):
            times = counted // 4**i % 4
            assert times == 1 if i in self.bookings else times <= 1, (i, times)

    @invariant()
    def sums_over_bookings_are_what_a_count_would_give(self) -> None:
        load, bookings = self.member.load(), self.bookings.values()
        waiting = [booking for booking in bookings if not booking.is_prefilled]
        assert load.num_active_requests == len(bookings)
        assert load.num_active_blocks == sum(booking.num_blocks for booking in bookings)
        assert load.num_active_prefills == len(waiting)
        assert load.num_active_prefill_tokens == sum(booking.num_prompt_tokens for booking in waiting)
        assert load.num_active_missing_tokens == sum(booking.num_missing_tokens for booking in waiting)


TestLaggingReports = LaggingReports.TestCase
