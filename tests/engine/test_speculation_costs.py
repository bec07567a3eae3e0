"""A step verifies as many drafted tokens as gain more than they cost, by the measured times of steps."""

import pytest

from common.timing import StepShape
from engine.sequence import Sequence as EngineSequence
from engine.speculation.costs import MAX_AGE, StepCosts
from engine.speculation.outcomes import Expected, Outcomes
from engine.steps.speculator import choose_rows
from tests.builders import make_core, make_request
from tests.engine.drafting import GuessingDrafter, a_sequence, eager, outputs_of


def line(num_rows: int, *, constant_s: float, per_row_s: float) -> list[float]:
    """Return the times of steps with `num_rows` and up to 99 more rows."""
    return [constant_s + per_row_s * (num_rows + i) for i in range(100)]


FREE = [0.0] * 100
CHEAP = line(1, constant_s=1.0, per_row_s=0.04)


def test_a_lone_answer_verifies_likely_tokens_and_no_unlikely_ones() -> None:
    sequence = a_sequence()
    likely, unlikely = [0.95**i for i in range(1, 9)], [0.03, 0.001]
    assert choose_rows({sequence: [likely]}, 1, CHEAP, FREE) == {sequence: (8,)}
    assert choose_rows({sequence: [likely]}, 1, CHEAP[:4], FREE) == {sequence: (3,)}
    assert choose_rows({sequence: [unlikely]}, 1, CHEAP, FREE) == {}
    tail = (0.9, 0.8, 0.02, 0.0001)
    assert choose_rows({sequence: [tail]}, 1, CHEAP, FREE) == {sequence: (2,)}


def test_drafts_that_take_time_must_bring_it_in() -> None:
    sequence, likely = a_sequence(), [0.95**i for i in range(1, 9)]
    assert choose_rows({sequence: [likely]}, 1, CHEAP, [0.0, *[0.1 * i for i in range(1, 9)]]) == {sequence: (8,)}
    assert choose_rows({sequence: [likely]}, 1, CHEAP, [0.0, *[0.4 * i for i in range(1, 9)]]) == {sequence: (6,)}
    assert choose_rows({sequence: [likely]}, 1, CHEAP, [0.0, *[0.95 * i for i in range(1, 9)]]) == {}


def test_a_large_batch_verifies_nothing_where_rows_cost_what_they_bring() -> None:
    batch = {a_sequence(): [(0.8, 0.64, 0.5)] for _ in range(32)}
    assert choose_rows(batch, 32, line(32, constant_s=0.2, per_row_s=0.06), FREE) == {}


def test_the_answers_that_copy_get_the_rows() -> None:
    copying, free = a_sequence(), a_sequence()
    drafts = {copying: [(0.9, 0.81, 0.73)], free: [(0.2, 0.04, 0.01)]}
    assert choose_rows(drafts, 2, line(2, constant_s=1.0, per_row_s=0.2), FREE) == {copying: (3,)}


def test_an_answer_that_copies_does_not_hold_up_seven_that_do_not() -> None:
    likely, times_s = [0.95**i for i in range(1, 9)], line(8, constant_s=0.6, per_row_s=0.05)
    copying, *others = sequences = [a_sequence() for _ in range(8)]
    assert choose_rows({copying: [likely]}, 8, times_s, FREE) == {}
    assert choose_rows({each: [likely[:2]] for each in sequences}, 8, times_s, FREE) == dict.fromkeys(sequences, (2,))
    unequal = choose_rows({copying: [likely]} | {each: [likely[:2]] for each in others}, 8, times_s, FREE)
    assert unequal.items() >= dict.fromkeys(others, (2,)).items()


def test_branches_get_rows_where_they_are_likelier_than_longer_drafts() -> None:
    sequence = a_sequence()
    unsure, sure = [[0.4, 0.1, 0.03], [0.3, 0.02]], [[0.95, 0.9, 0.85], [0.04]]
    assert choose_rows({sequence: unsure}, 1, CHEAP[:3], FREE) == {sequence: (1, 1)}
    assert choose_rows({sequence: sure}, 1, CHEAP, FREE) == {sequence: (3,)}
    dear = line(1, constant_s=0.2, per_row_s=0.4)
    assert choose_rows({sequence: unsure}, 1, dear, FREE) == {}


def observed(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, seconds in steps:
        costs.observe(StepShape(num_decodes=num_rows), seconds)
    return costs


def test_cost_of_a_row_is_what_the_latest_steps_show_without_what_other_work_adds() -> None:
    usual = [(1, 1.0), (9, 1.8), (17, 3.0)] * 4
    assert observed(*usual).predict(1, 16)[::8] == pytest.approx([1.0, 1.8, 3.0])
    assert observed(*usual).predict(9, 4)[-1] == pytest.approx(2.4)
    disturbed = [*usual, (1, 9.0), (9, 30.0), (17, 5.0)]
    assert observed(*disturbed).predict(1, 16) == observed(*usual).predict(1, 16)
    slower = [*usual, *((rows, 3 * seconds) for rows, seconds in usual * 2)]
    assert observed(*slower).predict(1, 16)[::8] == pytest.approx([3.0, 5.4, 9.0])


def test_more_rows_never_look_faster_than_fewer_and_unknown_ones_are_not_free() -> None:
    times = observed(*[(1, 1.0), (5, 0.9)] * 4).predict(1, 12)
    assert times == sorted(times)
    assert times[0] == 0.9
    assert times[12] > times[4]
    unknown = observed(*[(8, 1.0)] * 8).predict(8, 8)
    assert unknown[0] == pytest.approx(1.0)
    assert 1.1 < unknown[8] < 2.0  # not for nothing, and not twice the time


def test_row_is_not_taken_for_free_in_a_large_batch_whatever_was_measured() -> None:
    flat = observed(*[(32, 1.0), (64, 1.0)] * 8).predict(32, 32)
    batch = {a_sequence(): [(0.6, 0.36)] for _ in range(32)}
    assert choose_rows(batch, 32, flat, FREE) == {}


def test_costs_of_long_ago_are_forgotten() -> None:
    costs = observed(*[(9, 50.0)] * 8, *[(1, 1.0)] * MAX_AGE)
    assert costs.predict(1, 8)[8] < 2.0


def outcome(num_answers: int, gain: float, num_tokens: int, seconds: float) -> tuple[Expected, int, float]:
    return Expected(num_answers=num_answers, num_tokens=num_answers * gain, seconds=1.0), num_tokens, seconds


def optimism(num_answers: int, *steps: tuple[Expected, int, float]) -> float:
    outcomes = Outcomes()
    for expected, num_tokens, seconds in steps:
        outcomes.observe(expected, num_tokens=num_tokens, seconds=seconds)
    return outcomes.optimism(num_answers)


def test_drafts_that_keep_less_than_they_promise_must_promise_more() -> None:
    plain, good, slow = outcome(32, 1.0, 32, 1.0), outcome(32, 1.5, 48, 1.0), outcome(32, 1.5, 48, 1.5)
    assert optimism(32, *[plain, good] * 50) == pytest.approx(1.0)
    assert 1.3 < optimism(32, *[plain, slow] * 50) < 1.6
    assert optimism(1, *[plain, slow] * 50) == 1.0
    assert optimism(32, *[plain, slow] * 50, *[plain] * 500) < 1.05  # it tries again
    busy = [outcome(32, 1.0, 32, 3.0), outcome(32, 1.5, 48, 3.0)]
    assert optimism(32, *busy * 50) < 1.2  # the machine is slow for all


class Hopeless(GuessingDrafter):
    """Is sure to be wrong, and counts how often it is asked."""

    num_looks = 0

    def prospects(self, sequence: EngineSequence, max_tokens: int) -> list[list[float]]:
        self.num_looks += 1
        return [[0.01] * max_tokens]


def test_a_batch_without_worthwhile_drafts_is_seldom_looked_at() -> None:
    drafter = Hopeless(lambda _sequence: [], rate=0.0)
    core = make_core(max_steps_in_flight=1, num_blocks=400, max_running=16, speculator=eager(drafter))
    requests = [make_request([i + 1], max_tokens=41, ignore_eos=True) for i in range(16)]
    outputs_of(core, requests)
    assert 0 < drafter.num_looks <= 16 * 40 // 4  # 16 answers of 40 steps; rests of 4 behind each look
    assert core.load().num_drafted_tokens == 0
