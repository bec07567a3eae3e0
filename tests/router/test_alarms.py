"""Alarms about prefix routing: when they are raised, which worker they name, and when they clear."""

import logging
from dataclasses import replace

import pytest

from common.ids import RequestId, WorkerId
from common.timing import GUESSED_TIMING, MIN_SAMPLES, StepModel
from kvrelay.v1 import worker_pb2
from router.fleet.decisions import DecisionRecord
from router.fleet.member import Member, WorkerState
from router.observe.alarms import (
    CLEAR_ABOVE,
    MIN_DECISIONS,
    MIN_UNREPORTED,
    RAISE_BELOW,
    SILENCE_S,
    WINDOW_DECISIONS,
    AlarmKind,
    Alarms,
    PaceWatch,
)
from router.placement.plans import Plan
from tests.clock import ManualClock
from tests.router.fake_worker import BLOCK_SIZE
from tests.router.members import make_facts, make_member

P0, P1 = WorkerId("p0"), WorkerId("p1")


class Router:
    """The alarms of a router with two workers, and the events that they see."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.members: dict[WorkerId, Member] = {}
        for worker_id in (P0, P1):
            member = self.members[worker_id] = make_member(worker_id=worker_id)
            member.state, member.reported_s = WorkerState.READY, self.clock.monotonic()
        self.alarms = Alarms(members=lambda: self.members, block_size=lambda: BLOCK_SIZE, clock=self.clock)

    def decide(
        self,
        *,
        predicted: int = 0,
        found: int | None = 0,
        worker_id: WorkerId = P0,
        num_hashed_blocks: int = 10,
        num_held_blocks: int = 0,
    ) -> DecisionRecord:
        """Decide a request and end it; the alarms see the decision."""
        plan = Plan(answering=worker_id, predicted_cached_tokens=predicted, reason="test")
        decision = DecisionRecord(
            request_id=RequestId("r"),
            tenant="",
            num_tokens=10 * BLOCK_SIZE,
            plan=plan,
            decided_s=self.clock.monotonic(),
            num_hashed_blocks=num_hashed_blocks,
            num_held_blocks=num_held_blocks,
            num_cached_tokens=found,
            ttft_s=None if found is None else 0.1,
        )
        self.alarms.note(decision)
        return decision

    def hear_of_blocks(self, worker_id: WorkerId = P0) -> None:
        self.members[worker_id].stored_s = self.clock.monotonic()

    def hear_load(self, *, num_running: int) -> None:
        report = worker_pb2.LoadReport(num_running=num_running)
        self.members[P0].take_report(report, now_s=self.clock.monotonic())

    def hear_tier_alarms(self, *alarms: str, worker_id: WorkerId) -> None:
        report = worker_pb2.LoadReport(tier_alarms=alarms)
        self.members[worker_id].take_report(report, now_s=self.clock.monotonic())

    def standing(self) -> list[str]:
        self.alarms.check()
        kinds = [text.split(":")[0] for text in self.alarms.texts]
        assert kinds == [kind.value for kind in AlarmKind if self.alarms.is_raised(kind)]
        return kinds


# ── promises ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_broken_promises_raise_an_alarm_that_names_the_worst_worker() -> None:
    router = Router()
    for _ in range(MIN_DECISIONS):
        router.decide(predicted=100, found=20)
        router.decide(predicted=100, found=90, worker_id=P1)
    assert router.standing() == ["predicted_hits"]
    (text,) = router.alarms.texts
    assert "55% were found (worst: p0 20%, p1 90%)" in text


@pytest.mark.parametrize(("num_decisions", "kinds"), [(MIN_DECISIONS - 1, []), (MIN_DECISIONS, ["predicted_hits"])])
def test_few_decisions_raise_nothing(num_decisions: int, kinds: list[str]) -> None:
    router = Router()
    for _ in range(num_decisions):
        router.decide(predicted=100, found=0)
    for _ in range(1000):
        router.decide(predicted=0, found=0, num_hashed_blocks=0)  # nothing was promised
        router.decide(predicted=100, found=None)  # nothing is known
    assert router.standing() == kinds


@pytest.mark.parametrize(
    ("promises", "kinds"),
    [
        pytest.param([(100, 100)], [], id="kept"),
        pytest.param([(100, 0), (100, 1000)], ["predicted_hits"], id="more than promised makes up for no other one"),
        pytest.param([(100_000, 100_000), (10, 0)], [], id="each weighs by its tokens"),
    ],
)
def test_only_broken_promises_that_weigh_much_raise_an_alarm(promises: list[tuple[int, int]], kinds: list[str]) -> None:
    router = Router()
    for _ in range(MIN_DECISIONS):
        for predicted, found in promises:
            router.decide(predicted=predicted, found=found)
    assert router.standing() == kinds


def test_alarm_of_promises_clears_only_well_above_where_it_was_raised() -> None:
    router = Router()
    for share, kinds in (
        (RAISE_BELOW + 0.01, []),
        (RAISE_BELOW - 0.01, ["predicted_hits"]),
        (CLEAR_ABOVE - 0.01, ["predicted_hits"]),
        (CLEAR_ABOVE + 0.01, []),
        (RAISE_BELOW + 0.01, []),
    ):
        for _ in range(WINDOW_DECISIONS):
            router.decide(predicted=1000, found=round(1000 * share))
        assert router.standing() == kinds, share


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_unreported(router: Router, num_prompts: int) -> None:
    for _ in range(num_prompts):
        router.decide(found=BLOCK_SIZE)
        router.clock.advance(SILENCE_S / 2)


def test_worker_that_computes_but_reports_no_block_raises_an_alarm() -> None:
    router = Router()
    compute_unreported(router, MIN_UNREPORTED)
    assert router.standing() == ["no_kv_events"]
    assert "p0 (3 prompts in 15 s)" in router.alarms.texts[0]
    router.hear_of_blocks(P1)
    assert router.standing() == ["no_kv_events"]
    router.hear_of_blocks(P0)
    assert router.standing() == []


def test_worker_that_computes_what_it_holds_without_windows_raises_nothing() -> None:
    router = Router()
    for _ in range(MIN_UNREPORTED):
        router.decide(found=0, num_held_blocks=10)
        router.clock.advance(SILENCE_S / 2)
    assert router.standing() == []
    compute_unreported(router, MIN_UNREPORTED)
    assert router.standing() == ["no_kv_events"]


@pytest.mark.parametrize(("num_prompts", "wait_s"), [(MIN_UNREPORTED - 1, 100.0), (MIN_UNREPORTED, 0.0)])
def test_few_prompts_or_a_short_time_without_blocks_raise_nothing(num_prompts: int, wait_s: float) -> None:
    router = Router()
    for _ in range(num_prompts):
        router.decide(found=0)
    router.clock.advance(wait_s)
    assert router.standing() == []


def test_worker_that_reports_blocks_before_the_end_raises_nothing() -> None:
    router = Router()
    for _ in range(10):
        decision = router.decide(found=0, num_hashed_blocks=0)
        router.clock.advance(SILENCE_S)
        router.hear_of_blocks()
        decision.num_hashed_blocks = 10
        router.alarms.note(decision)
    assert router.standing() == []


def test_prompts_without_a_new_full_block_need_no_event() -> None:
    router = Router()
    # The second one is cached as a whole: its last token is computed again, and its last block with it.
    for found, num_hashed_blocks in ((10 * BLOCK_SIZE, 10), (9 * BLOCK_SIZE, 10), (0, 0), (2 * BLOCK_SIZE + 1, 2)):
        for _ in range(MIN_UNREPORTED):
            router.decide(found=found, num_hashed_blocks=num_hashed_blocks)
            router.clock.advance(SILENCE_S)
    assert router.standing() == []


@pytest.mark.parametrize("what", ["leaves", "restarts"])
def test_worker_that_leaves_or_restarts_clears_its_alarm(what: str) -> None:
    router = Router()
    compute_unreported(router, MIN_UNREPORTED)
    assert router.standing() == ["no_kv_events"]
    if what == "leaves":
        del router.members[P0]
    else:
        router.members[P0].begin_life(make_facts(num_blocks=10, epoch=2))
    assert router.standing() == []


# ── updates ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_running", "kinds"), [(1, ["no_updates"]), (0, [])])
def test_only_a_worker_that_was_busy_must_send_updates(num_running: int, kinds: list[str]) -> None:
    router = Router()
    router.hear_load(num_running=num_running)
    router.clock.advance(SILENCE_S - 0.5)
    assert router.standing() == []
    router.clock.advance(0.5)
    assert router.standing() == kinds
    router.hear_load(num_running=num_running)
    assert router.standing() == []


def test_worker_that_is_lost_is_not_silent_but_lost() -> None:
    router = Router()
    router.hear_load(num_running=1)
    router.members[P0].state = WorkerState.LOST
    router.clock.advance(SILENCE_S)
    assert router.standing() == []


def test_alarm_is_logged_when_it_is_raised_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    router.hear_load(num_running=1)
    router.clock.advance(SILENCE_S)
    with caplog.at_level(logging.INFO, logger="router.observe.alarms"):
        for _ in range(3):
            router.alarms.check()
        router.hear_load(num_running=1)
        for _ in range(3):
            router.alarms.check()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def pool_with(*step_s: float) -> list[Member]:
    """Return the ready workers of one pool, with the time of a typical step of each."""
    members = []
    for number, seconds in enumerate(step_s):
        member = make_member(worker_id=f"d{number}")
        member.state = WorkerState.READY
        decode = StepModel(constant_s=seconds, num_samples=MIN_SAMPLES)
        member.reported_timing = replace(GUESSED_TIMING, decode=decode)
        members.append(member)
    return members


@pytest.mark.parametrize(
    ("step_s", "slow"),
    [((0.01, 0.029), []), ((0.01, 0.031), ["d1"]), ((0.04, 0.01, 0.011), ["d0"]), ((5.0,), []), ((), [])],
)
def test_worker_much_slower_than_its_pool_is_named(step_s: tuple[float, ...], slow: list[str]) -> None:
    text = PaceWatch().check(pool_with(*step_s)) or ""
    assert [f"d{number}" for number in range(3) if f"d{number} (" in text] == slow


@pytest.mark.parametrize(
    "model",
    [
        StepModel(constant_s=0.01, per_context_token_s=2e-5, num_samples=MIN_SAMPLES),
        StepModel(constant_s=0.05, num_samples=MIN_SAMPLES),
    ],
)
def test_worker_whose_model_is_slow_only_where_it_never_measured_is_not_named(model: StepModel) -> None:
    members = pool_with(0.0, 0.0)
    for member, decode in zip(members, (model, StepModel(constant_s=0.01, per_decode_s=3e-3)), strict=True):
        assert member.reported_timing is not None
        decode = replace(decode, num_samples=MIN_SAMPLES)
        member.reported_timing = replace(member.reported_timing, decode=decode)
    assert PaceWatch().check(members) is None, "a healthy worker would be taken out of use"


def test_slow_worker_stays_named_until_it_is_clearly_faster_again() -> None:
    watch = PaceWatch()
    assert [watch.check(pool_with(0.01, seconds)) is not None for seconds in (0.025, 0.04, 0.025, 0.015, 0.025)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_worker_without_measurements_is_neither_slow_nor_a_measure_for_others() -> None:
    members = pool_with(0.01, 0.05)
    members[0].reported_timing = None
    assert PaceWatch().check(members) is None


def test_controller_is_told_how_slow_each_measured_worker_is() -> None:
    watch, members = PaceWatch(), pool_with(0.01, 0.04, 0.01)
    members[2].reported_timing = None
    watch.check(members)
    assert watch.slowness == {"d0": pytest.approx(0.25), "d1": pytest.approx(4.0)}
    assert list(watch.slow) == ["d1"]
    watch.check([])
    assert not watch.slow


# ── tiers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_whose_tiers_have_trouble_are_named_until_they_have_none() -> None:
    router = Router()
    for worker_id in (P0, P1):
        router.hear_tier_alarms("the disk is full", worker_id=worker_id)
    assert router.standing() == ["tier"]
    assert router.alarms.texts == ("tier: p0, p1: the disk is full",)
    router.hear_tier_alarms(worker_id=P1)
    router.members[P0].state = WorkerState.LOST
    assert router.standing() == []
