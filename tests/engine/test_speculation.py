"""Speculation over the fake engine: whatever is drafted, answers are those that come token by token."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import EngineFault
from common.structured_outputs import structure_text
from common.timing import StepShape
from common.tokens import TokenArray, as_tokens
from engine.core import EngineCore
from engine.events import DraftCounts, TokenOutput, Tokens
from engine.executor import ScheduledSequence, StepResult
from engine.request import EngineRequest
from engine.sequence import Sequence as EngineSequence
from engine.speculation.costs import MAX_AGE, StepCosts
from engine.speculation.drafter import Draft
from engine.speculation.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter, NgramIndex
from engine.speculation.outcomes import Expected, Outcomes
from engine.speculation.speculator import Speculator, choose_rows
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    expected_tokens,
    make_core,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.drafting import GuessingDrafter, draft_of, drafts_of, eager
from tests.engine.overlap import Spy

STRUCTURE = structure_text({"regex": "(ab|c){2,9}(xyz)?"})


def guesses(
    requests: Sequence[EngineRequest], *, rate: float, seed: int = 0, num_tokens: int = 5, num_branches: int = 0
) -> Speculator:
    """Return a speculator that knows the answers to some requests."""
    known = {id(request): request for request in requests}

    @functools.cache
    def answer(request_id: int, sample: int) -> list[int]:
        return expected_tokens(known[request_id], sample=sample)

    def answer_of(sequence: EngineSequence) -> list[int]:
        return answer(id(sequence.request), sequence.sample_index)

    drafter = GuessingDrafter(answer_of, rate=rate, seed=seed, num_branches=num_branches)
    return eager(drafter, num_tokens=num_tokens)


def outputs_of(core: EngineCore, requests: Sequence[EngineRequest]) -> list[list[TokenOutput]]:
    """Serve requests in one batch and return the outputs of each, by sample."""
    collectors: list[Collector] = [submit(core, request)[1] for request in requests]
    run_until_idle(core)
    assert_empty(core)
    return [sorted(each.outputs, key=lambda output: (output.sample_index, output.token_index)) for each in collectors]


SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 2, 3]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 4),
        "num_logprobs": st.sampled_from([None, 2]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset(b"e"), frozenset(b"aeiou")]),
        "structured_outputs": st.sampled_from(["", "", STRUCTURE]),
    }
)


SHORT: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.0,
    "seed": 0,
    "n": 1,
    "ignore_eos": False,
    "min_tokens": 0,
    "num_logprobs": None,
    "presence_penalty": 0.0,
    "stop_token_ids": frozenset(),
    "structured_outputs": "",
}


@example(  # samples that share a page: one copies it, and the others are preempted in the same step
    prompts=[[4] * 7, [4] * 11],
    samplings=[SHORT, SHORT | {"n": 3, "structured_outputs": STRUCTURE}, SHORT],
    rate=0.0,
    seed=0,
    num_branches=0,
    num_blocks=10,
    max_step_tokens=10,
    max_steps_in_flight=1,
)
@given(
    prompts=st.lists(st.lists(st.integers(4, 250), min_size=1, max_size=11), min_size=1, max_size=3),
    samplings=st.lists(SAMPLING, min_size=3, max_size=3),
    rate=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 99),
    num_branches=st.sampled_from([0, 1, 3]),
    num_blocks=st.integers(10, 24),
    max_step_tokens=st.integers(9, 40),
    max_steps_in_flight=st.sampled_from([1, 2]),
)
@settings(max_examples=50, deadline=None)
def test_answers_are_those_without_speculation_whatever_is_drafted(
    prompts: list[list[int]],
    samplings: list[dict[str, Any]],
    rate: float,
    seed: int,
    num_branches: int,
    num_blocks: int,
    max_step_tokens: int,
    max_steps_in_flight: int,
) -> None:
    requests = [
        make_request(prompt, **each | {"min_tokens": min(each["min_tokens"], each["max_tokens"])})
        for prompt, each in zip(prompts, samplings, strict=False)
    ]
    make = functools.partial(make_core, num_blocks=num_blocks, max_step_tokens=max_step_tokens, max_running=9)
    plain = make(max_steps_in_flight=1)
    speculator = guesses(requests, rate=rate, seed=seed, num_branches=num_branches)
    core = make(max_steps_in_flight=max_steps_in_flight, speculator=speculator)
    assert outputs_of(core, requests) == outputs_of(plain, requests)


def test_drafting_that_fails_ends_no_answer_and_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(GuessingDrafter):
        def draft(self, wanted: Mapping[EngineSequence, Sequence[int]]) -> dict[EngineSequence, list[TokenArray]]:
            raise EngineFault("logits have no finite maximum")

    request = make_request(range(5, 12), max_tokens=12, ignore_eos=True)
    answer = expected_tokens(request)
    core = make_core(max_steps_in_flight=1, speculator=eager(Failing(lambda _sequence: answer, rate=1.0)))
    (outputs,) = outputs_of(core, [request])
    assert [output.token_id for output in outputs] == answer
    assert [record.getMessage()[:19] for record in caplog.records] == ["drafting has failed"]


@pytest.mark.parametrize("num_prompt_tokens", [BLOCK_SIZE * 2 + d for d in (-1, 0, 1)])
def test_right_drafts_save_steps_and_fill_the_prefix_cache_to_the_same_block(num_prompt_tokens: int) -> None:
    request = make_request(range(10, 10 + num_prompt_tokens), max_tokens=21, ignore_eos=True)
    plain, core = make_core(), make_core(max_steps_in_flight=1, speculator=guesses([request], rate=1.0, num_tokens=5))
    spy = Spy(core)
    collector = served(core, request)
    assert collector.token_ids() == served(plain, request).token_ids()
    drafts = [event.drafts for event in collector.events if isinstance(event, Tokens)]
    assert drafts == [DraftCounts(), *[DraftCounts(5, 5)] * 3, DraftCounts(1, 1)]
    assert core.load().drafts[0] == DraftCounts(4, 4)
    assert len(spy.batches) == 1 + 4  # the prompt, 3 x (5 drafted + 1), 2 left
    assert set(core.pool.snapshot().stored) == set(plain.pool.snapshot().stored)
    assert core.load().num_drafted_tokens == core.load().num_accepted_tokens == 5 + 5 + 5 + 1


def test_wrong_drafts_hold_no_page_after_their_step() -> None:
    request = make_request(range(10, 10 + BLOCK_SIZE), max_tokens=9, ignore_eos=True)
    core = make_core(max_steps_in_flight=1, speculator=guesses([request], rate=0.0, num_tokens=9))
    group, collector = submit(core, request)
    while core.has_work:
        for each, event in core.step():
            each.sink(event)
        sequence = group.leader
        assert len(sequence.block_table) == -(-sequence.num_computed // BLOCK_SIZE)
    assert collector.token_ids() == expected_tokens(request)


def test_drafts_take_no_page_that_a_running_answer_may_need() -> None:
    requests = [make_request(range(i, i + 6), max_tokens=12, ignore_eos=True) for i in (10, 40)]
    plain = make_core(num_blocks=11, max_steps_in_flight=1)
    core = make_core(num_blocks=11, max_steps_in_flight=1, speculator=guesses(requests, rate=0.3, num_tokens=8))
    assert outputs_of(core, requests) == outputs_of(plain, requests)
    assert core.load().num_drafted_tokens
    assert core.load().num_preemptions == plain.load().num_preemptions == 0


def test_nothing_is_drafted_before_steps_are_measured_or_without_verification() -> None:
    request = make_request([*range(10, 20)] * 3, max_tokens=20, ignore_eos=True)
    unmeasured = make_core(max_steps_in_flight=1, speculator=Speculator(NgramDrafter(), num_tokens=8))
    served(unmeasured, request)
    assert unmeasured.load().num_drafted_tokens == 0
    core = make_core()
    core.executor.verifies_drafts = False
    limits = core.scheduler.limits
    unable = EngineCore(core.executor, limits, core._clock, guesses([request], rate=1.0))  # noqa: SLF001
    assert served(unable, request).token_ids() == expected_tokens(request)
    assert unable.load().num_drafted_tokens == 0


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Planted:
    """A `Drafter` of a wrong token behind each right one of an answer, and of right ones in its place: a branch."""

    def __init__(self, answer: Sequence[int], *, depth: int) -> None:
        self._answer = answer
        self._depth = depth

    def prospects(self, sequence: EngineSequence, max_tokens: int) -> list[list[float]]:
        num_left = min(max_tokens, len(self._answer) - sequence.num_output_tokens)
        return [[0.99] * num_left, [0.98] * (num_left - self._depth)] if num_left > self._depth else []

    def draft(self, wanted: Mapping[EngineSequence, Sequence[int]]) -> dict[EngineSequence, list[TokenArray]]:
        return {sequence: self._paths(sequence, lens) for sequence, lens in wanted.items()}

    def _paths(self, sequence: EngineSequence, lens: Sequence[int]) -> list[TokenArray]:
        right = as_tokens(self._answer[sequence.num_output_tokens :][: lens[0]])
        wrong = right[:]
        wrong[self._depth] ^= 1
        return [wrong, right]

    def costs_s(self, num_sequences: int, num_tokens: int) -> None:
        pass

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        pass

    def forget(self, sequence: EngineSequence) -> None:
        pass


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("num_prompt_tokens", [BLOCK_SIZE * 2 + d for d in (-1, 0, 1)])
def test_right_branch_saves_steps_like_a_right_draft_and_publishes_its_blocks(
    num_prompt_tokens: int, depth: int
) -> None:
    request = make_request(range(10, 10 + num_prompt_tokens), max_tokens=21, ignore_eos=True)
    answer, plain = expected_tokens(request), make_core()
    core = make_core(max_steps_in_flight=1, speculator=eager(Planted(answer, depth=depth), num_tokens=5))
    spy = Spy(core)
    collector = served(core, request)
    assert collector.token_ids() == served(plain, request).token_ids() == answer
    trees = [item for batch in spy.batches for item in batch if item.branches]
    assert len(trees) >= 3
    assert all(len(item.branches) == 1 and item.num_drafted == 10 - depth for item in trees[:3])
    assert len(spy.batches) <= 1 + 3 + 2  # the prompt, 3 x (5 drafted + 1), 2 left
    assert set(core.pool.snapshot().stored) == set(plain.pool.snapshot().stored)
    assert_empty(core)
    assert core.load().num_accepted_tokens >= 15


def test_branches_that_find_no_page_are_left_out_and_preempt_nobody() -> None:
    requests = [make_request(range(i, i + 6), max_tokens=12, ignore_eos=True) for i in (10, 40)]
    plain = make_core(num_blocks=11, max_steps_in_flight=1)
    speculator = guesses(requests, rate=0.5, num_tokens=4, num_branches=3)
    core = make_core(num_blocks=11, max_steps_in_flight=1, speculator=speculator)
    spy = Spy(core)
    assert outputs_of(core, requests) == outputs_of(plain, requests)
    assert core.load().num_drafted_tokens
    assert any(item.branches for batch in spy.batches for item in batch)
    assert core.load().num_preemptions == 0


@pytest.mark.parametrize("fault", ["launch", "results"])
def test_failed_step_gives_back_the_pages_of_its_branches(fault: str) -> None:
    request = make_request(range(10, 20), max_tokens=20, ignore_eos=True)
    core = make_core(max_steps_in_flight=1, speculator=eager(Planted(expected_tokens(request), depth=0)))
    spy = Spy(core)
    if fault == "launch":
        spy.fail_launch_of = 2
    else:
        spy.fail_results_of = {2}
    _group, collector = submit(core, request)
    run_until_idle(core)
    assert collector.failure is not None
    assert_empty(core)


def test_answer_that_ends_inside_a_branch_drops_the_rest_of_it() -> None:
    free = expected_tokens(make_request([1, 2, 3], max_tokens=12, ignore_eos=True))
    stop = next(i for i in range(3, len(free)) if free[i] not in free[:i])
    request = make_request([1, 2, 3], max_tokens=12, ignore_eos=True, stop_token_ids=frozenset({free[stop]}))
    core = make_core(max_steps_in_flight=1, speculator=eager(Planted(free, depth=1), num_tokens=9))
    assert served(core, request).token_ids() == free[: stop + 1]
    assert_empty(core)


def test_tree_of_drafts_keeps_what_is_new_in_each() -> None:
    paths = [[1, 2, 3], [1, 2, 3, 4], [1, 5, 6], [1, 5, 7], [2], [1, 2]]
    draft = Draft.of(map(as_tokens, paths))
    assert list(draft.token_ids) == [1, 2, 3, 4]
    assert [(branch.depth, list(branch.token_ids)) for branch in draft.branches] == [(1, [5, 6]), (0, [2])]


# ── how much is verified ────────────────────────────────────────────────────────────────────────────────────────────


def a_sequence(length: int = 100) -> EngineSequence:
    return EngineSequence.from_request(make_request(range(length)), block_size=BLOCK_SIZE, order=0)


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


# ── n-grams ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def common_len(text: list[int], place: int) -> int:
    """Return how many tokens before a place are those at the end of a text."""
    length = 0
    while length < min(MAX_MATCH, place) and text[place - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


@given(text=TEXTS, pieces=st.lists(st.integers(1, 7), max_size=10))
def test_source_of_a_draft_is_the_latest_place_with_the_longest_match(text: list[int], pieces: list[int]) -> None:
    index, known = NgramIndex(), as_tokens(())
    for size in [*pieces, len(text)]:
        known += as_tokens(text[len(known) : len(known) + size])
        assert index.extend(known)
    behind_pair = [p for p in range(MIN_MATCH, len(text)) if common_len(text, p) >= MIN_MATCH][-8:]
    longest = {text[p]: (common_len(text, p), p) for p in sorted(behind_pair, key=lambda p: (common_len(text, p), p))}
    expected = sorted(longest.values(), reverse=True)
    assert [(match_len, place) for place, match_len in index.find(known, 3)] == expected[:3]
    assert index.find(known) == index.find(known, 3)[:1]


def test_other_continuations_of_the_same_words_are_branches_of_their_own() -> None:
    drafter, sequence = NgramDrafter(num_branches=2), a_sequence(0)
    sequence.token_ids = as_tokens([1, 2, 8, 1, 2, 9])
    found = []
    for time in range(30):  # the draft and its branch are right by turns
        sequence.token_ids += as_tokens([1, 2])
        found.append(drafter.prospects(sequence, 1))
        drafts = drafts_of(drafter, sequence, 1)
        sequence.token_ids.append(drafts[time % 2][0])
    assert sorted(draft[0] for draft in drafts) == [8, 9]
    assert all(branch[0] <= chain[0] for chain, branch in found)
    assert found[-1][1][0] > 2 * found[0][1][0]


def test_draft_continues_what_repeats_and_grows_sure_of_itself() -> None:
    drafter, sequence = NgramDrafter(), a_sequence(0)
    sequence.token_ids = as_tokens([7, 8, 9, 5, 7, 8])
    first = drafter.prospects(sequence, 6)
    assert draft_of(drafter, sequence, 6) == [9, 5, 7, 8, 9, 5]  # beyond the end of the text, the draft repeats itself
    for token_id in [9, 5, 7, 8] * 6:
        sequence.token_ids.append(token_id)
        later = drafter.prospects(sequence, 6)
    assert later[0][0] > first[0][0]
    assert later[0] == sorted(later[0], reverse=True)
    for token_id in (1, 2, 3, 4):
        sequence.token_ids.append(token_id)
    assert drafter.prospects(sequence, 6)[0][0] < 0.5


def test_draft_comes_back_to_its_source_behind_a_word_that_was_replaced_or_put_in() -> None:
    drafter, source = NgramDrafter(), list(range(100, 130))
    for written, follows in (([100, 101, 102, 1], 104), ([100, 101, 102, 1, 103], 104), ([100, 101, 102, 104], 105)):
        sequence = a_sequence(0)
        sequence.token_ids = as_tokens([*source, *written[:3]])
        drafter.prospects(sequence, 4)
        for token_id in written[3:]:
            sequence.token_ids.append(token_id)
            draft = draft_of(drafter, sequence, 4)
        assert draft == list(range(follows, follows + 4))


def test_predictions_that_fail_lower_the_chances_without_any_verified_draft() -> None:
    drafter, sequence = NgramDrafter(), a_sequence(0)
    sequence.token_ids = as_tokens([1, 2])
    chances = []
    for other in range(10, 40):  # what follows [1, 2] is never what followed it before
        sequence.token_ids += as_tokens([other, 1, 2])
        chances.append(drafter.prospects(sequence, 1)[0][0])
    assert chances[-1] < 0.5 * chances[0]
