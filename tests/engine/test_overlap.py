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


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_sequence_with_a_grammar_waits_for_its_tokens_while_others_go_on(penalty: float) -> None:
    core, spy = spied()
    free = make_request([1, 2], max_tokens=8, ignore_eos=True, presence_penalty=penalty)
    structured = make_request([3, 4], max_tokens=8, structured_outputs=structure_text({"regex": "[ab]{20}"}))
    (free_group, free_out), (waiting_group, waiting_out) = submit(core, free), submit(core, structured)
    run_until_idle(core)
    rows: dict[Any, list[int | None]] = {free_group.leader: [], waiting_group.leader: []}
    for batch in spy.batches:
        for item in batch:
            rows[item.sequence].append(item.input_row)
    assert rows[waiting_group.leader] == [None] * 8
    assert rows[free_group.leader].count(None) == 1
    assert free_out.token_ids() == expected_tokens(free)
    assert waiting_out.token_ids() == expected_tokens(structured)


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
