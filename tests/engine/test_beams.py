"""Beams in an engine: equal to the oracle in any batch, with any pages, and nothing is held at the end."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, PromptTooLong
from common.sampling import SamplingParams
from common.wire_names import FinishReason
from engine import beams
from engine.beams import BeamSnapshot
from engine.core import EngineCore
from engine.events import BeamsAdvanced, Tokens
from engine.request import EngineRequest
from engine.sequence import SequenceState
from tests import builders
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    expected_tokens,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.beam_oracle import expected_beams
from tests.engine.overlap import Spy, step

MakeCore = Callable[..., EngineCore]


@pytest.fixture(name="make_core", params=[1, 2], ids=["in turn", "overlapped"])
def _make_core(request: pytest.FixtureRequest) -> MakeCore:
    return partial(builders.make_core, max_steps_in_flight=request.param)


def beam_request(prompt: Any, n: int, **sampling: Any) -> EngineRequest:
    return make_request(prompt, n=n, use_beam_search=True, **sampling)


def answers(collector: Collector, n: int) -> list[list[int]]:
    """Return every sample's tokens."""
    assert collector.failure is None
    return [collector.token_ids(i) for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_beams_in_any_batch_and_any_pool_equal_the_oracle(data: st.DataObject) -> None:
    draw = data.draw
    core = builders.make_core(
        num_blocks=draw(st.integers(14, 40)),
        max_step_tokens=draw(st.integers(3, 24)),
        max_running=draw(st.integers(3, 12)),
        max_steps_in_flight=draw(st.integers(1, 2)),
    )
    works = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        n = draw(st.integers(1, 4))
        options: dict[str, Any] = {"max_tokens": draw(st.integers(1, 9)), "ignore_eos": draw(st.booleans())}
        if n > 1 and draw(st.booleans()):
            options |= {"min_tokens": draw(st.integers(0, options["max_tokens"]))}
            options |= {"use_beam_search": True, "length_penalty": draw(st.sampled_from([0.0, 1.0, 2.0]))}
        request = make_request(prompt, n=n, **options)
        if request.sampling.has_beams and draw(st.booleans()):
            request = replace(request, beams=draw(st.sampled_from([None, *snapshots_of(request)])))
        try:
            works.append(submit(core, request))
        except PromptTooLong:
            assert n > 1
        for _ in range(draw(st.integers(0, 6))):
            if core.has_work:
                step(core)
    run_until_idle(core)
    for group, collector in works:
        request = group.request
        n = request.sampling.n
        single = [expected_tokens(request, sample=i) for i in range(n)]
        assert answers(collector, n) == (expected_beams(request) if request.sampling.has_beams else single)
    assert_empty(core)


def test_beams_that_run_out_of_pages_are_preempted_together_and_find_the_same(make_core: MakeCore) -> None:
    core = make_core(num_blocks=26)
    first = make_request(range(20), max_tokens=80, ignore_eos=True)
    wide = beam_request(range(9), 3, max_tokens=30, ignore_eos=True)
    _group, alone = submit(core, first)
    while len(alone.outputs) < 30:
        step(core)
    group, found = submit(core, wide)
    while core.has_work and not core.scheduler.num_preemptions:
        step(core)
    assert [beam.state for beam in group.sequences] == [SequenceState.WAITING] * 3
    run_until_idle(core)
    assert alone.token_ids() == expected_tokens(first)
    assert answers(found, 3) == expected_beams(wide)
    assert_empty(core)


def test_beams_fit_exactly_as_many_pages_as_their_check_asks_for(make_core: MakeCore) -> None:
    request = beam_request(range(2 * BLOCK_SIZE + 1), 4, max_tokens=3 * BLOCK_SIZE, ignore_eos=True)
    num_blocks = 2 + 4 * 3  # the last of 21 tokens is never computed: 5 blocks, of which 2 are shared
    with pytest.raises(PromptTooLong, match=f"need {num_blocks} KV blocks"):
        submit(make_core(num_blocks=num_blocks - 1), request)
    core = make_core(num_blocks=num_blocks)
    assert answers(served(core, request), 4) == expected_beams(request)
    assert_empty(core)


def test_beams_compute_every_position_once_and_share_full_pages() -> None:
    core = builders.make_core()
    spy = Spy(core)
    request = beam_request(range(10), 4, max_tokens=8, ignore_eos=True)
    served(core, request)
    num_new = [sum(item.num_new_tokens for item in batch) for batch in spy.batches]
    assert num_new == [10, *[4] * 7]  # nothing is computed twice, and all beams in every step
    assert core.scheduler.num_preemptions == 0


def test_beams_tell_nothing_before_their_end_and_why_each_ended(make_core: MakeCore) -> None:
    core = make_core()
    request = beam_request(b"prompt", 4, max_tokens=6)
    collector = served(core, request)
    events = [event for event in collector.events if isinstance(event, Tokens)]
    assert [bool(event.tokens) for event in events] == [False, True, True, True, True]
    assert events[0].prefill_s is not None
    for i in range(4):
        reasons = [o.finish_reason for o in collector.outputs if o.sample_index == i]
        is_longest = len(reasons) == 6 and collector.token_ids(i)[-1] != 0
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] is not None
        assert is_longest or reasons[-1] is FinishReason.STOP


def test_one_beam_is_a_greedy_answer_that_streams(make_core: MakeCore) -> None:
    core = make_core()
    collector = served(core, beam_request(b"prompt", 1, temperature=1.0, ignore_eos=True))
    assert collector.token_ids() == expected_tokens(make_request(b"prompt", ignore_eos=True))
    assert len([event for event in collector.events if isinstance(event, Tokens)]) == 8


def test_tokens_without_text_come_as_one_run_per_beam(make_core: MakeCore) -> None:
    request = beam_request(b"prompt", 3, detokenize=False, max_tokens=9)
    collector = served(make_core(), request)
    runs = [run for event in collector.events if isinstance(event, Tokens) for run in event.runs]
    assert [list(run.token_ids) for run in runs] == expected_beams(request)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 17),
        ("stop", ("a",)),
        ("logprobs", 1),
        ("prompt_logprobs", 0),
        ("presence_penalty", 0.5),
        ("logit_bias", ((1, 1.0),)),
        ("structured_outputs", '{"regex": "a"}'),
    ],
)
def test_what_beams_do_not_support_is_refused_by_name(field: str, value: Any) -> None:
    name = {"logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}.get(field, field)
    sampling = replace(SamplingParams(n=2, use_beam_search=True), **{name: value})
    with pytest.raises(InvalidRequest, match=field):
        sampling.validate(vocab_size=256)


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_options_of_beam_search_are_refused_without_it(field: str, value: Any) -> None:
    sampling = replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"{field}.*use_beam_search"):
        sampling.validate(vocab_size=256)


def snapshots_of(request: EngineRequest) -> list[BeamSnapshot]:
    """Return the state of a search after every step but the last."""
    with mock.patch.object(beams, "SNAPSHOT_TOKENS", 1):
        collector = served(builders.make_core(), request)
    return [event.snapshot for event in collector.events if isinstance(event, BeamsAdvanced)]


def test_snapshots_of_a_long_search_are_few_and_their_sizes_bounded() -> None:
    request = beam_request([1], 2, max_tokens=500, ignore_eos=True)
    collector = served(builders.make_core(num_blocks=512), request)
    sizes = [e.snapshot.num_tokens for e in collector.events if isinstance(e, BeamsAdvanced)]
    assert sizes == [32, 64, 96, 128, 160, 200, 250, 312, 390, 487]


def test_snapshot_that_would_be_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beams, "MAX_SNAPSHOT_TOKENS", 70)
    collector = served(builders.make_core(), beam_request([1], 2, max_tokens=80, ignore_eos=True))
    assert [e.snapshot.num_tokens for e in collector.events if isinstance(e, BeamsAdvanced)] == [32]


@pytest.mark.parametrize("max_running", [1, 3])
def test_a_search_wider_than_the_batch_may_be_still_ends_when_it_goes_on_elsewhere(
    make_core: MakeCore, max_running: int
) -> None:
    request = beam_request([0], 4, max_tokens=4)
    resumed = replace(request, beams=snapshots_of(request)[0])
    core = make_core(max_running=max_running, max_step_tokens=3)
    assert answers(served(core, resumed), 4) == expected_beams(request)
    assert_empty(core)
