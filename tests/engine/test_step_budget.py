"""How much of a prompt a step holds beside answers with an objective for their gaps.

The model: 10 ms a step with prompts and 1 ms a token of them; 10 ms a step of decodes alone.
"""

import math
from dataclasses import replace

import pytest

from common.timing import StepModel, StepShape, TimingModel
from engine.core import EngineCore
from engine.sequence import Sequence
from engine.steps.budget import MAX_CHUNKS, MAX_FIXED_SHARE, SPARED_SHARE, STEP_SHARE, StepBudget
from tests.builders import make_core, make_request, submit
from tests.clock import ManualClock

STEP_TOKENS = 64
TIMING = TimingModel(
    prefill=StepModel(constant_s=0.010, per_prefill_token_s=0.001),
    decode=StepModel(constant_s=0.010),
    max_step_tokens=STEP_TOKENS,
)
DECODES = StepShape(num_decodes=1, num_context_tokens=8)


def answer(tpot_slo_s: float) -> Sequence:
    """Return a sequence that decodes."""
    request = replace(make_request([1, 2, 3]), tpot_slo_s=tpot_slo_s)
    sequence = Sequence.from_request(request, block_size=4, order=0)
    sequence.num_computed = sequence.num_tokens - 1
    return sequence


def budget() -> StepBudget:
    made = StepBudget()
    made.take_timing(TIMING)
    return made


def test_step_beside_a_new_answer_takes_no_longer_than_its_objective() -> None:
    max_s = budget().max_step_s(DECODES, [answer(0.040), answer(math.inf)], now_s=5.0)
    assert max_s == pytest.approx(STEP_SHARE * 0.040)


@pytest.mark.parametrize("tpot_slo_s", [math.inf, 0.005], ids=["no objective", "one that cannot be kept"])
def test_answer_whose_objective_cannot_be_kept_does_not_hold_prompts_up(tpot_slo_s: float) -> None:
    assert budget().max_step_s(DECODES, [answer(tpot_slo_s)], now_s=0.0) == math.inf


def test_answer_that_is_ahead_of_its_objective_gives_what_it_has_spared_once() -> None:
    made, running = budget(), [answer(0.040)]
    limit_s = STEP_SHARE * 0.040
    assert made.max_step_s(DECODES, running, now_s=0.0) == pytest.approx(limit_s)
    spared_s = 100 * SPARED_SHARE * limit_s - 1.0  # after a second with 100 steps of 10 ms
    assert made.max_step_s(DECODES, running, now_s=1.0) == pytest.approx(limit_s + spared_s)
    made.launched(StepShape(num_prefill_tokens=4000, num_decodes=1))  # takes 4.01 s
    assert made.max_step_s(DECODES, running, now_s=5.01) == pytest.approx(limit_s)


def test_prompt_goes_on_in_small_chunks_beside_an_answer_that_spares_nothing() -> None:
    num = budget().num_fitting(DECODES, num_before=0, max_s=0.0101, max_tokens=STEP_TOKENS)
    assert num == STEP_TOKENS // MAX_CHUNKS


@pytest.mark.parametrize(
    ("fixed_s", "per_token_s", "num"), [(0.001, 0.001, 8), (0.004, 0.001, 32), (1.0, 0.001, 63), (0.001, 0.0, 63)]
)
def test_chunk_is_large_enough_for_the_fixed_time_of_its_step_to_be_small(
    fixed_s: float, per_token_s: float, num: int
) -> None:
    made = StepBudget()
    prefill = StepModel(constant_s=0.010 + fixed_s, per_prefill_token_s=per_token_s)
    made.take_timing(replace(TIMING, prefill=prefill))
    found = made.num_fitting(DECODES, num_before=0, max_s=0.0101, max_tokens=STEP_TOKENS)
    assert found == num
    assert num == STEP_TOKENS - DECODES.num_decodes or fixed_s <= MAX_FIXED_SHARE * num * per_token_s * (1 + 1e-9)


def test_chunk_within_a_time_takes_that_time() -> None:
    model = replace(TIMING, prefill=replace(TIMING.prefill, per_prefill_pair_s=1e-6), max_step_tokens=10_000)
    for num_before in (0, 3000):
        num = model.chunk_within(0.5, num_before=num_before, beside=DECODES)
        pairs = num * num_before + num * (num + 1) // 2
        step = replace(DECODES, num_prefill_tokens=num, num_prefill_pairs=pairs)
        assert model.step_s(step) == pytest.approx(0.5, rel=0.01)


def steps_of_prompt(core: EngineCore, clock: ManualClock, *, tpot_slo_s: float) -> list[int]:
    """Return the prompt tokens of each step while a long prompt is computed beside an answer."""
    submit(core, replace(make_request([1, 2, 3], max_tokens=200, ignore_eos=True), tpot_slo_s=tpot_slo_s))
    for _ in range(3):
        core.finish_step(core.begin_step()[0])
    submit(core, make_request(range(100, 250), max_tokens=1))
    chunks: list[int] = []
    while sum(chunks) < 150:
        plan, _events = core.begin_step()
        chunks.append(plan.shape.num_prefill_tokens)
        core.finish_step(plan)
        clock.advance(TIMING.step_s(plan.shape))
    return chunks


@pytest.mark.parametrize(("tpot_slo_s", "largest"), [(math.inf, STEP_TOKENS - 1), (0.040, 27)])
def test_engine_cuts_a_prompt_so_that_the_answer_beside_it_keeps_its_pace(tpot_slo_s: float, largest: int) -> None:
    clock = ManualClock()
    core = make_core(max_step_tokens=STEP_TOKENS, clock=clock, num_blocks=128)
    core.scheduler.budget.take_timing(TIMING)
    assert max(steps_of_prompt(core, clock, tpot_slo_s=tpot_slo_s)) == largest


def test_time_that_a_preempted_answer_waits_is_nothing_that_it_has_spared() -> None:
    core = make_core(max_step_tokens=STEP_TOKENS, clock=ManualClock(), num_blocks=24)
    core.scheduler.budget.take_timing(TIMING)
    answers = [
        submit(core, replace(make_request([first] * 8, max_tokens=80, ignore_eos=True), tpot_slo_s=0.04))[0].leader
        for first in (1, 2)
    ]
    for _ in range(3):
        core.finish_step(core.begin_step()[0])
    submit(core, make_request([3] * 8, max_tokens=1))
    core.finish_step(core.begin_step()[0])
    assert None not in [answer.decodes_since for answer in answers]
    while not core.scheduler.num_preemptions:
        core.finish_step(core.begin_step()[0])
    assert [answer.decodes_since is None for answer in answers] == [False, True]
