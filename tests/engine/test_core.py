"""EngineCore over the fake engine, whose answers depend on every byte of KV it reads; in turn and overlapped."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from common.errors import EngineFault, PromptTooLong, Refused
from common.fake_tokenizer import EOS_TOKEN_ID
from common.ids import RequestId
from common.wire_names import FinishReason
from engine.core import EngineCore
from engine.events import Started, Tokens
from engine.executor import DeviceBroken
from engine.steps.failed_steps import MAX_FAILED_STEPS
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
from tests.engine.overlap import Spy, step

MakeCore = Callable[..., EngineCore]
BOUNDARY_LENGTHS = sorted({1, *(BLOCK_SIZE * k + d for k in (1, 2, 5) for d in (-1, 0, 1))})


@pytest.fixture(name="make_core", params=[1, 2], ids=["in turn", "overlapped"])
def _make_core(request: pytest.FixtureRequest) -> MakeCore:
    return partial(builders.make_core, max_steps_in_flight=request.param)


@pytest.mark.parametrize("num_prompt_tokens", BOUNDARY_LENGTHS)
@pytest.mark.parametrize("max_step_tokens", [16, 17, 64])
def test_generate_at_block_and_chunk_boundaries_equals_oracle(
    make_core: MakeCore, num_prompt_tokens: int, max_step_tokens: int
) -> None:
    core = make_core(max_step_tokens=max_step_tokens)
    request = make_request(range(num_prompt_tokens), max_tokens=11, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        collector = served(core, request)
        assert collector.token_ids() == expected_tokens(request)
    assert_empty(core)


def test_generate_when_prompt_is_cached_computes_only_the_rest(make_core: MakeCore) -> None:
    core = make_core()
    prompt = list(range(4 * BLOCK_SIZE))
    for expected_cached in (0, 3 * BLOCK_SIZE):  # the last token is always computed
        collector = served(core, make_request(prompt))
        (started,) = [event for event in collector.events if isinstance(event, Started)]
        assert started.num_cached_tokens == expected_cached


def test_siblings_computed_side_by_side_all_leave_their_prompts_in_the_cache(make_core: MakeCore) -> None:
    core = make_core()
    prompts = [[1] * 2 * BLOCK_SIZE + [i] * 2 * BLOCK_SIZE for i in range(4)]
    for prompt in prompts:
        submit(core, make_request(prompt, max_tokens=3, ignore_eos=True))
    run_until_idle(core)
    for prompt in prompts:
        again = served(core, make_request(prompt, max_tokens=3, ignore_eos=True))
        assert [e.num_cached_tokens for e in again.events if isinstance(e, Started)] == [3 * BLOCK_SIZE]
        assert again.token_ids() == expected_tokens(make_request(prompt, max_tokens=3, ignore_eos=True))
    assert_empty(core)


def test_generate_with_other_salt_never_sees_cached_blocks(make_core: MakeCore) -> None:
    core = make_core()
    prompt = list(range(4 * BLOCK_SIZE))
    for salt in ("a", "b"):
        collector = served(core, make_request(prompt, salt=salt))
        (started,) = [event for event in collector.events if isinstance(event, Started)]
        assert started.num_cached_tokens == 0


def test_preempted_request_is_resumed_before_later_arrivals_start(make_core: MakeCore) -> None:
    core = make_core(num_blocks=7, max_step_tokens=32)
    _g, early = submit(core, make_request([0] * 9, max_tokens=12, ignore_eos=True))
    _g, late = submit(core, make_request([1] * 9, max_tokens=12, ignore_eos=True))
    _g, last = submit(core, make_request([2] * 9, max_tokens=12, ignore_eos=True))
    while not last.events:
        step(core)
    assert core.load().num_preemptions > 0
    assert (len(early.outputs), len(late.outputs)) == (12, 12)
    run_until_idle(core)
    assert_empty(core)


@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
def test_n_samples_share_prompt_pages_and_equal_single_samples(make_core: MakeCore, num_prompt_tokens: int) -> None:
    core = make_core()
    request = make_request(range(num_prompt_tokens), n=5, temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    _group, collector = submit(core, request)
    while not collector.outputs:
        step(core)
    assert core.load().num_used_blocks == -(-num_prompt_tokens // BLOCK_SIZE), "samples must share the prompt's pages"
    run_until_idle(core)
    for sample in range(5):
        assert collector.token_ids(sample) == expected_tokens(request, sample=sample)
    assert_empty(core)


def test_finish_reasons_stop_token_eos_length_and_context_end(make_core: MakeCore) -> None:
    core = make_core(max_model_len=16)
    request = make_request([1, 2, 3], max_tokens=5, ignore_eos=True)
    free_run = expected_tokens(request)
    _g, length = submit(core, request)
    stops = frozenset({free_run[2]})
    _g, stop = submit(core, make_request([1, 2, 3], max_tokens=5, ignore_eos=True, stop_token_ids=stops))
    context = served(core, make_request(range(12), max_tokens=100, ignore_eos=True))
    assert (len(length.outputs), length.outputs[-1].finish_reason) == (5, FinishReason.LENGTH)
    assert stop.token_ids() == free_run[: free_run.index(free_run[2]) + 1]
    assert stop.outputs[-1].finish_reason is FinishReason.STOP
    assert (len(context.outputs), context.outputs[-1].finish_reason) == (4, FinishReason.LENGTH)
    assert_empty(core)


def test_eos_ends_a_sample_unless_ignored(make_core: MakeCore) -> None:
    core = make_core()
    for seed in range(200):
        request = make_request([seed], temperature=1.0, seed=seed, max_tokens=40)
        expected = expected_tokens(request)
        if expected[-1] == EOS_TOKEN_ID:
            collector = served(core, request)
            assert collector.token_ids() == expected
            assert collector.outputs[-1].finish_reason is FinishReason.STOP
            return
    raise AssertionError("the fake never drew its end-of-sequence token")


def test_prompt_logprobs_of_a_prompt_preempted_half_way_come_once(make_core: MakeCore) -> None:
    core = make_core(num_blocks=16, max_step_tokens=5)
    _g, early = submit(core, make_request([0] * 11, max_tokens=40, ignore_eos=True))
    while not early.outputs:
        step(core)
    late = served(core, make_request([1] * 43, max_tokens=2, num_prompt_logprobs=1))
    assert core.load().num_preemptions > 0
    assert next(len(event.prompt_logprobs) for event in late.events if isinstance(event, Tokens)) == 42
    assert_empty(core)


def test_add_when_line_is_full_is_refused_with_retry_hint(make_core: MakeCore) -> None:
    core = make_core(max_waiting=2)
    for _ in range(2):
        submit(core, make_request([1]))
    refused = core.add(make_request([1]), Collector())
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(512, 1), (600, 1), (30, 40)])
def test_add_when_it_can_never_fit_raises_prompt_too_long(
    make_core: MakeCore, num_prompt: int, max_tokens: int
) -> None:
    core = make_core(num_blocks=16)
    with pytest.raises(PromptTooLong):
        core.add(make_request([1] * num_prompt, max_tokens=max_tokens), Collector())
    assert_empty(core)


def test_step_when_executor_fails_ends_only_that_batch(make_core: MakeCore) -> None:
    core = make_core()
    group, collector = submit(core, make_request([1, 2, 3]))
    Spy(core).fail_launch_of = 0
    step(core)
    assert collector.failure is not None
    assert isinstance(collector.failure.error, EngineFault)
    assert group.is_over
    assert_empty(core)
    _group, after = submit(core, make_request([1, 2, 3]))
    run_until_idle(core)
    assert after.token_ids() == expected_tokens(_group.request)


def test_device_on_which_step_after_step_fails_ends_the_engine(make_core: MakeCore) -> None:
    core = make_core()
    broken = mock.patch.object(core.executor, "launch", side_effect=RuntimeError("CUDA error: device-side assert"))
    with broken, pytest.raises(DeviceBroken):
        for number in range(MAX_FAILED_STEPS):
            request = replace(make_request(range(5)), request_id=RequestId(f"req-{number}"))
            assert served(core, request).failure is not None


@pytest.mark.parametrize("num_prompt_tokens", [3, 2 * BLOCK_SIZE])
def test_logits_that_are_not_finite_end_their_own_request_alone(make_core: MakeCore, num_prompt_tokens: int) -> None:
    core = make_core()
    spy = Spy(core)
    bad, good = (
        replace(make_request(range(first, first + num_prompt_tokens), max_tokens=9, n=2), request_id=RequestId(name))
        for first, name in ((5, "bad"), (40, "good"))
    )
    (group, failing), (_other, answering) = submit(core, bad), submit(core, good)
    for _ in range(3):
        step(core)
    spy.break_logits_of.add(bad.request_id)
    step(core)
    assert failing.failure is not None
    assert "finite" in str(failing.failure.error)
    assert group.is_over
    late = submit(core, request := make_request([7, 8], max_tokens=3))[1]
    run_until_idle(core)
    alone = served(make_core(), good)
    assert [answering.token_ids(i) for i in range(2)] == [alone.token_ids(i) for i in range(2)]
    assert late.token_ids() == expected_tokens(request)
    assert_empty(core)


def test_prompt_whose_logits_are_not_finite_leaves_nothing_in_the_prefix_cache(make_core: MakeCore) -> None:
    core = make_core()
    Spy(core).break_logits_of.add((request := make_request(range(3 * BLOCK_SIZE))).request_id)
    assert served(core, request).failure is not None
    assert not core.pool.snapshot().stored
    assert_empty(core)


@pytest.mark.parametrize("fails", ["launch", "results"])
def test_device_that_says_it_is_broken_ends_the_engine_at_once(make_core: MakeCore, fails: str) -> None:
    core = make_core()
    handle = mock.Mock(**{"results.side_effect": DeviceBroken("illegal memory access")})
    launch = DeviceBroken("illegal memory access") if fails == "launch" else [handle]
    submit(core, make_request(range(5), max_tokens=1))
    with mock.patch.object(core.executor, "launch", side_effect=launch), pytest.raises(DeviceBroken, match="illegal"):
        run_until_idle(core)


def test_device_whose_logits_are_never_finite_ends_the_engine(make_core: MakeCore) -> None:
    core = make_core()
    spy = Spy(core)
    requests = [
        replace(make_request(range(5)), request_id=RequestId(f"req-{number}")) for number in range(MAX_FAILED_STEPS)
    ]
    spy.break_logits_of.update(request.request_id for request in requests)
    for request in requests[:-1]:
        assert served(core, request).failure is not None
    with pytest.raises(DeviceBroken):
        served(core, requests[-1])


def test_one_request_that_fails_again_and_again_does_not_end_the_engine(make_core: MakeCore) -> None:
    core = make_core()
    with mock.patch.object(core.executor, "launch", side_effect=RuntimeError("cannot sample")):
        for _ in range(2 * MAX_FAILED_STEPS):
            assert served(core, make_request(range(5))).failure is not None
    assert_empty(core)
