"""EngineCore with two steps in flight: what is launched before the tokens of the step before it are known."""

from typing import Any

import pytest

from common.errors import EngineFault
from common.structured_outputs import structure_text
from engine.events import Started, Tokens
from tests.builders import (
    assert_empty,
    expected_tokens,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.overlap import spied, step


def test_step_with_two_in_flight_launches_the_next_before_the_last_results() -> None:
    core, spy = spied()
    request = make_request([1, 2, 3], max_tokens=5, ignore_eos=True)
    _group, collector = submit(core, request)
    step(core)
    assert (len(spy.batches), spy.taken) == (1, [])
    for step_idx in range(1, 5):
        step(core)
        assert (len(spy.batches), spy.taken) == (step_idx + 1, list(range(step_idx)))
    step(core)
    assert (len(spy.batches), spy.taken) == (5, [0, 1, 2, 3, 4]), "max_tokens is known beforehand: no sixth step"
    assert [[item.input_row for item in batch] for batch in spy.batches] == [[None], [0], [0], [0], [0]]
    assert collector.token_ids() == expected_tokens(request)
    assert not core.has_work
    assert_empty(core)


def test_plan_when_context_ends_launches_nothing_behind_the_last_token() -> None:
    core, spy = spied(max_model_len=16)
    collector = served(core, make_request(range(12), max_tokens=100, ignore_eos=True))
    assert (len(spy.batches), len(collector.outputs)) == (4, 4)


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}, {"num_logprobs": 1}, {"temperature": 1.0}])
def test_sequence_with_a_grammar_gets_a_token_in_every_step(sampling: dict[str, Any]) -> None:
    core, spy = spied()
    free = make_request([1, 2], max_tokens=8, ignore_eos=True, **sampling)
    structured = make_request(
        [3, 4], max_tokens=8, structured_outputs=structure_text({"regex": "[ab]{20}"}), **sampling
    )
    (free_group, free_out), (structured_group, structured_out) = submit(core, free), submit(core, structured)
    run_until_idle(core)
    rows: dict[Any, list[int | None]] = {free_group.leader: [], structured_group.leader: []}
    for batch in spy.batches:
        for item in batch:
            rows[item.sequence].append(item.input_row)
    assert len(spy.batches) == 8
    assert rows == {free_group.leader: [None] + [0] * 7, structured_group.leader: [None] + [1] * 7}
    assert free_out.token_ids() == expected_tokens(free)
    assert structured_out.token_ids() == expected_tokens(structured)


def test_tokens_that_a_grammar_forces_take_the_place_of_a_sample_in_flight() -> None:
    core, spy = spied()
    structure = structure_text({"regex": "[ab] and then [cd] and then [ef]"})
    request = make_request([3, 4], max_tokens=40, structured_outputs=structure)
    collector = served(core, request)
    assert collector.token_ids() == expected_tokens(request)
    computed = [item.num_new_tokens for batch in spy.batches for item in batch]
    assert computed == [2, 1, 10, 1, 10, 1], "a step chooses, the next one's choice is void, one reads what is forced"
    assert_empty(core)


def test_grammar_that_ends_an_answer_is_not_asked_again_by_the_step_behind() -> None:
    core, spy = spied()
    short = make_request([3, 4], max_tokens=40, structured_outputs=structure_text({"regex": "[ab]{4}[ab]?"}))
    long = make_request([5, 6], max_tokens=12, structured_outputs=structure_text({"regex": "[ab]{40}"}))
    (_group, short_out), (_group, long_out) = submit(core, short), submit(core, long)
    run_until_idle(core)
    assert short_out.token_ids() == expected_tokens(short)
    assert long_out.token_ids() == expected_tokens(long)
    assert len(spy.batches) == 12
    assert_empty(core)


def test_fault_of_a_late_choice_ends_the_requests_of_its_step_alone() -> None:
    core, spy = spied()
    structure = structure_text({"regex": "[ab]{20}"})
    _group, lost = submit(core, make_request([3, 4], max_tokens=9, structured_outputs=structure))
    done_request = make_request([5, 6], max_tokens=3, ignore_eos=True)
    _group, done = submit(core, done_request)
    spy.fail_choice_of = 3
    run_until_idle(core)
    assert lost.failure is not None
    assert "no choice" in str(lost.failure.error)
    assert (done.failure, done.token_ids()) == (None, expected_tokens(done_request))
    assert len(lost.outputs) == 3
    assert_empty(core)
    request = make_request([3, 4], max_tokens=9, structured_outputs=structure)
    assert served(core, request).token_ids() == expected_tokens(request)


@pytest.mark.parametrize("failing", [{2}, {2, 3}])
def test_fault_of_a_step_fails_the_requests_of_the_step_behind_it_too(failing: set[int]) -> None:
    core, spy = spied(max_step_tokens=16)
    spy.fail_results_of = failing
    _g, early = submit(core, make_request([1, 2], max_tokens=20, ignore_eos=True))
    for _ in range(3):
        step(core)
    joined_group, joined = submit(core, make_request(range(30), max_tokens=20, ignore_eos=True))
    step(core)  # launches step 3, with the new prompt; takes step 2, which fails
    assert [item.sequence for item in spy.batches[3]][1:] == joined_group.sequences
    for collector in (early, joined):
        assert collector.failure is not None
        assert isinstance(collector.failure.error, EngineFault)
        assert "no results of step 2" in str(collector.failure.error)
    assert (core.num_steps_in_flight, spy.taken) == (0, [0, 1, 2, 3]), "the step behind must not run any more"
    assert_empty(core)
    request = make_request([1, 2], max_tokens=5, ignore_eos=True)
    after = served(core, request)
    assert after.token_ids() == expected_tokens(request)


def test_fault_of_a_launch_spares_what_is_in_flight() -> None:
    core, spy = spied(max_running=8)
    done_request = make_request([5, 6], max_tokens=2, ignore_eos=True)
    _g, lost = submit(core, make_request([1, 2], max_tokens=20, ignore_eos=True))
    _g, done = submit(core, done_request)
    step(core)
    step(core)  # both tokens of the second request are in flight or known
    spy.fail_launch_of = 2
    step(core)
    assert lost.failure is not None
    assert "no launch" in str(lost.failure.error)
    assert (done.failure, done.token_ids()) == (None, expected_tokens(done_request))
    assert core.num_steps_in_flight == 0
    assert_empty(core)


def test_started_is_emitted_before_the_step_is_launched() -> None:
    core, spy = spied()
    _g, first = submit(core, make_request([1, 2], max_tokens=20, ignore_eos=True))
    step(core)
    _g, second = submit(core, make_request([3, 4], max_tokens=20, ignore_eos=True))
    plan, emitted = core.begin_step()
    for group, event in emitted:
        group.sink(event)
    assert (len(spy.batches), core.num_steps_in_flight) == (1, 1)
    assert [type(event) for event in second.events] == [Started]
    core.finish_step(plan)
    assert len(spy.batches) == 2
    assert not [event for event in first.events if isinstance(event, Tokens)], "they come with the return value"
