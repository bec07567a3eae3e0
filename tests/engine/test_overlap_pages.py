"""Ownership of pages while steps are in flight: nothing is granted, published or taken away too early."""

import numpy as np
import pytest

from common.errors import Refused
from engine.events import EngineEvent, PrefillProgress, Started
from engine.fake_model import token_kv
from engine.sequence import SequenceState
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    expected_tokens,
    granted,
    make_core,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.engine.overlap import ending_request, spied, step, step_until_flight_knows


@pytest.mark.parametrize("ending", ["stop token", "stop string", "cancel"])
def test_pages_of_an_ended_sequence_are_not_granted_while_a_step_writes_them(ending: str) -> None:
    request, expected = ending_request()
    if ending != "stop token":
        request, expected = make_request([1, 2, 3], max_tokens=30, ignore_eos=True), expected[:-1]
    core = make_core(num_blocks=8)
    group, collector = submit(core, request)
    step_until_flight_knows(core, collector, len(expected))
    if ending == "stop string":
        core.finish_sample(group, 0)
    elif ending == "cancel":
        core.cancel(group)
    assert group.is_over
    transferred = make_request(range(100, 130), max_tokens=2)  # needs every page
    assert isinstance(core.reserve(transferred, Collector()), Refused)
    step(core)
    reservation = granted(core.reserve(transferred, Collector()))
    source = make_core()
    prefill = granted(source.add_prefill_only(transferred, Collector()))
    run_until_idle(source)
    data = bytes(source.executor.kv.read_blocks(prefill.leader.block_ids()))
    core.executor.kv.write_blocks(reservation.leader.block_ids(), memoryview(data))
    run_until_idle(core)
    assert bytes(core.executor.kv.read_blocks(reservation.leader.block_ids())) == data
    assert collector.token_ids() == expected
    core.cancel(reservation)
    assert_empty(core)


def test_block_is_published_once_all_its_tokens_are_known_and_computed() -> None:
    core = make_core()
    request = make_request([7] * BLOCK_SIZE, max_tokens=2 * BLOCK_SIZE, ignore_eos=True)
    group, collector = submit(core, request)
    while not group.is_over:
        known = BLOCK_SIZE + len(collector.outputs)
        # The last known token's own KV is being computed by the step in flight.
        num_expected = max(0, known - 1) // BLOCK_SIZE if collector.outputs else 0
        assert len(core.pool.snapshot().stored) == num_expected
        step(core)
    run_until_idle(core)
    assert_empty(core)


def test_page_exhaustion_by_a_pending_token_takes_all_steps_then_preempts() -> None:
    core, spy = spied(num_blocks=6)
    requests = [make_request([i] * (2 * BLOCK_SIZE - 1), max_tokens=10, ignore_eos=True) for i in range(3)]
    collectors = [submit(core, request)[1] for request in requests]
    while core.load().num_preemptions == 0:
        launched = len(spy.batches)
        in_flight = core.num_steps_in_flight
        step(core)
    assert in_flight == 0, "no sequence loses pages while a step is in flight"
    assert len(spy.batches) == launched + 1
    run_until_idle(core)
    assert [c.token_ids() for c in collectors] == [expected_tokens(request) for request in requests]
    assert_empty(core)


def test_prompt_whose_pages_a_puller_reads_is_not_preempted() -> None:
    core = make_core(num_blocks=8, max_step_tokens=2)
    decode_request = make_request([1] * 7, max_tokens=14, ignore_eos=True)
    _g, decoding = submit(core, decode_request)
    while not decoding.outputs:
        step(core)
    sent = Collector()
    held = granted(core.add_prefill_only(make_request([2] * 15), sent))  # four pages, a token in each step
    while core.load().num_preemptions == 0:
        step(core)
    assert (core.load().num_running, core.load().num_held) == (1, 0), "what is left is the prompt"
    while core.has_work:
        step(core)
    assert held.leader.state is SequenceState.HELD
    assert len([event for event in sent.events if isinstance(event, Started)]) == 1
    core.cancel(held)
    core.wake()
    run_until_idle(core)
    assert decoding.token_ids() == expected_tokens(decode_request)
    assert_empty(core)


def test_progress_of_a_prompt_covers_only_kv_that_exists() -> None:
    core, spy = spied(max_step_tokens=8)
    prompt = list(range(30))
    seen: list[int] = []

    def sink(event: EngineEvent) -> None:
        if isinstance(event, PrefillProgress):
            seen.append(event.num_computed_tokens)
            pages = core.executor.kv.read_blocks(event.block_table)
            found = np.frombuffer(pages, dtype="<u8")[: event.num_computed_tokens]
            assert found.tolist() == [token_kv(prompt[p], p) for p in range(event.num_computed_tokens)]

    group = granted(core.add_prefill_only(make_request(prompt), sink))
    run_until_idle(core)
    assert seen == [8, 16, 24, 30]
    assert len(spy.batches) == 4, "nothing is computed behind a prompt that is held"
    core.cancel(group)
    assert_empty(core)


def test_block_of_a_chunk_in_flight_is_not_published() -> None:
    core = make_core(max_step_tokens=BLOCK_SIZE)
    submit(core, make_request(range(3 * BLOCK_SIZE), max_tokens=1))
    stored = []
    while core.has_work:
        step(core)
        stored.append(len(core.pool.snapshot().stored))
    assert stored == [0, 1, 2, 3]


def test_own_page_of_a_block_that_a_sibling_published_is_kept_while_in_flight() -> None:
    core = make_core(num_blocks=16)
    requests = [make_request([3] * 2 * BLOCK_SIZE, max_tokens=6, ignore_eos=True) for _ in range(2)]
    (_g, first), (sibling_group, second) = [submit(core, request) for request in requests]
    step(core)
    step(core)  # the prompts are published; the step in flight reads the sibling's own pages
    assert sibling_group.leader.retired_blocks
    reservation = granted(core.reserve(make_request(range(100, 128)), Collector()))
    size = core.executor.kv.shape.block_bytes * len(reservation.leader.block_table)
    core.executor.kv.write_blocks(reservation.leader.block_ids(), memoryview(bytes(size)))
    run_until_idle(core)
    assert first.token_ids() == second.token_ids() == expected_tokens(requests[0])
    core.cancel(reservation)
    assert_empty(core)


def test_page_that_a_step_in_flight_copies_from_is_not_granted() -> None:
    core = make_core(num_blocks=5, max_step_tokens=1)
    request = make_request([1, 2, 3], n=2, temperature=1.0, seed=8, max_tokens=5, ignore_eos=True)
    group, collector = submit(core, request)
    while not collector.outputs:
        step(core)
    step(core)  # one token a step: the leader has copied the page, its sibling has not run
    core.finish_sample(group, 1)
    reservation = granted(core.reserve(make_request([9]), Collector()))
    ones = b"\xff" * core.executor.kv.shape.block_bytes
    core.executor.kv.write_blocks(reservation.leader.block_ids(), memoryview(ones))
    run_until_idle(core)
    assert collector.token_ids() == expected_tokens(request)
    core.cancel(reservation)
    assert_empty(core)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(16, 1), (9, 8), (1, 16)])
def test_request_that_needs_exactly_all_pages_is_served(
    num_prompt: int, max_tokens: int, max_steps_in_flight: int
) -> None:
    core = make_core(num_blocks=4, max_steps_in_flight=max_steps_in_flight)
    request = make_request([0] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
    collector = served(core, request)
    assert collector.token_ids() == expected_tokens(request)
    assert_empty(core)
