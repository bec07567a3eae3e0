"""Speculation over the fake engine: whatever is drafted, answers are those that come token by token."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import EngineFault
from common.structured_outputs import structure_text
from common.tokens import TokenArray, as_tokens
from engine.core import EngineCore
from engine.events import DraftCounts, Tokens
from engine.request import EngineRequest
from engine.sequence import Sequence as EngineSequence
from engine.speculation.drafter import Draft
from engine.speculation.ngram import NgramDrafter
from engine.steps.speculator import Speculator
from tests.builders import (
    BLOCK_SIZE,
    assert_empty,
    expected_tokens,
    make_core,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.drafting import GuessingDrafter, eager, outputs_of
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


class Planted(GuessingDrafter):
    """Drafts a wrong token behind each right one of an answer, and right ones in its place: a branch."""

    def __init__(self, answer: Sequence[int], *, depth: int) -> None:
        super().__init__(lambda _sequence: answer, rate=1.0)
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
    spy = Spy(core)
    collector = served(core, request)
    assert collector.token_ids() == free[: stop + 1]
    assert_empty(core)
    (drafted,) = [item for batch in spy.batches for item in batch if item.branches]
    (counts,) = [event.drafts for event in collector.events if isinstance(event, Tokens) and event.drafts.num_drafted]
    assert counts == DraftCounts(drafted.num_drafted, stop - 1), "the first two tokens took a step each"


def test_tree_of_drafts_keeps_what_is_new_in_each() -> None:
    paths = [[1, 2, 3], [1, 2, 3, 4], [1, 5, 6], [1, 5, 7], [2], [1, 2]]
    draft = Draft.of(map(as_tokens, paths))
    assert list(draft.token_ids) == [1, 2, 3, 4]
    assert [(branch.depth, list(branch.token_ids)) for branch in draft.branches] == [(1, [5, 6]), (0, [2])]
