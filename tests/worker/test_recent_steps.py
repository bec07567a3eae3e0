"""Totals of a worker's steps over windows, with the least times of its device."""

import pytest

from common.timing import StepShape
from engine.events import StepSample
from engine.work import DeviceRates, ModelShape, StepFloors
from tests.clock import ManualClock
from worker.recent_steps import RecentSteps

MODEL = ModelShape(
    num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=4, vocab_size=5
)
FLOORS = StepFloors(
    model=MODEL,
    weight_bytes=100,
    kv_bytes_per_token=8,
    rates=DeviceRates(read_bytes_per_s=1000.0, flops_per_s=10_000.0),
)
PREFILL = StepSample(shape=StepShape(num_prefill_tokens=4, num_prefill_pairs=10), seconds=0.5)
DECODE = StepSample(shape=StepShape(num_decodes=2, num_context_tokens=20), seconds=0.25)


def test_totals_tell_prefill_and_decode_steps_apart_and_what_each_needs_at_least() -> None:
    steps = RecentSteps(FLOORS, ManualClock())
    steps.observe([PREFILL, DECODE, DECODE])
    _covered_s, totals = steps.over(60.0)
    assert (totals.num_prefill_steps, totals.num_decode_steps) == (1, 2)
    assert (totals.num_prefill_tokens, totals.num_decodes, totals.num_context_tokens) == (4, 4, 40)
    assert (totals.prefill_s, totals.decode_s) == (0.5, 0.5)
    assert totals.prefill_memory_s == pytest.approx(0.1)
    assert totals.prefill_compute_s == pytest.approx((2 * 40 * 4 + 2 * 10 + 8 * 10) / 10_000)
    assert totals.decode_memory_s == pytest.approx(2 * (0.1 + 20 * 8 / 1000))
    assert totals.decode_weights_s == pytest.approx(0.2)
    assert totals.decode_compute_s == pytest.approx(2 * (2 * 50 * 2 + 8 * 20) / 10_000)


def test_drafted_tokens_of_a_sequence_are_computed_but_read_its_keys_only_once() -> None:
    steps = RecentSteps(FLOORS, ManualClock())
    drafted = StepShape(num_decodes=5, num_context_tokens=56)
    steps.observe([StepSample(shape=drafted, seconds=0.25, undrafted=DECODE.shape, num_accepted=1)])
    _covered_s, totals = steps.over(60.0)
    assert (totals.num_decodes, totals.num_context_tokens) == (2, 20)
    assert totals.decode_memory_s == pytest.approx(FLOORS.memory_s(DECODE.shape))
    assert totals.decode_compute_s == pytest.approx(FLOORS.compute_s(drafted))
    assert (steps.memory_s, steps.compute_s) == (totals.decode_memory_s, totals.decode_compute_s)


def test_device_that_was_not_measured_has_no_least_times() -> None:
    steps = RecentSteps(None, ManualClock())
    steps.observe([PREFILL, DECODE])
    _covered_s, totals = steps.over(60.0)
    assert totals.num_decode_steps == 1
    assert totals.prefill_memory_s == totals.decode_compute_s == totals.decode_weights_s == 0.0


def test_window_leaves_older_steps_out_and_tells_how_much_it_covers() -> None:
    clock = ManualClock()
    steps = RecentSteps(FLOORS, clock)
    steps.observe([DECODE])
    assert steps.over(60.0)[0] == pytest.approx(0.0)
    clock.advance(200.0)
    steps.observe([PREFILL])
    for window_s, num_decode_steps in ((60.0, 0), (300.0, 1)):
        covered_s, totals = steps.over(window_s)
        assert (totals.num_prefill_steps, totals.num_decode_steps) == (1, num_decode_steps)
        assert covered_s == pytest.approx(min(window_s, 200.0), abs=10.0)


def test_steps_older_than_the_longest_window_take_no_memory() -> None:
    clock = ManualClock()
    steps = RecentSteps(FLOORS, clock)
    for _ in range(1000):
        steps.observe([DECODE])
        clock.advance(10.0)
    assert steps.over(1e9)[1].num_decode_steps <= 361


def test_time_between_steps_with_work_is_the_hosts() -> None:
    clock = ManualClock()
    steps = RecentSteps(FLOORS, clock)
    for passed_s, has_work in ((1.0, True), (0.4, True), (0.25, False), (5.0, True)):
        clock.advance(passed_s)
        steps.observe([DECODE], has_work=has_work)
    assert steps.over(60.0)[1].host_s == pytest.approx(0.15)


def test_pulled_bytes_need_the_time_of_their_link_once_it_was_measured() -> None:
    steps = RecentSteps(FLOORS, ManualClock())
    steps.note_pulled(100, bytes_per_s=None)
    steps.note_pulled(100, bytes_per_s=1000.0)
    _covered_s, totals = steps.over(60.0)
    assert (totals.kv_bytes_received, totals.link_s, steps.link_s) == (200, 0.1, 0.1)
