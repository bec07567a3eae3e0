"""Promises of window pages: they cover what is needed, and nothing waits for more than there is."""

from dataclasses import replace

import pytest

from common.errors import Refused
from common.tokens import as_tokens
from engine.beams import BeamSnapshot, LiveBeam
from engine.core import EngineCore
from engine.device.memory import NoRoomForPages
from engine.fake_pages import FakeWindow, fake_shape
from engine.pages.kv_cache import num_blocks_for_budget
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    expected_tokens,
    granted,
    make_core,
    make_request,
    run_until_idle,
    submit,
)
from tests.engine.overlap import step

PROMPT = [i % 2 for i in range(3 * BLOCK_SIZE + 1)]
WINDOW = 8


def _core(*, num_pages: int, num_blocks: int = 400, max_step_tokens: int = 400) -> EngineCore:
    window = FakeWindow(num_tokens=WINDOW, num_pages=num_pages)
    return make_core(num_blocks=num_blocks, max_step_tokens=max_step_tokens, max_steps_in_flight=1, window=window)


def _promises_cover_needs(core: EngineCore) -> None:
    windows = core.pool.windows
    assert windows is not None
    assert windows.num_needed <= windows.num_promised <= windows.num_pages


def test_promises_cover_the_samples_that_go_on_when_others_have_ended() -> None:
    core = _core(num_pages=200)
    group, _collector = submit(core, make_request(PROMPT, n=4, temperature=1.0, max_tokens=12, ignore_eos=True))
    while len(group.sequences) < 4:
        step(core)
    for sample in (1, 2, 0):
        core.finish_sample(group, sample)
        _promises_cover_needs(core)
    run_until_idle(core)
    assert_empty(core)


def test_beams_of_another_worker_are_admitted_where_all_of_them_fit() -> None:
    core = _core(num_pages=200)
    request = make_request(PROMPT * 30, n=4, use_beam_search=True, max_tokens=6, ignore_eos=True)
    live = tuple(LiveBeam(token_ids=as_tokens([ord("a") + i]), logprob=-float(i)) for i in range(4))
    begun = BeamSnapshot(live=live, complete=())
    _group, collector = submit(core, replace(request, beams=begun))
    run_until_idle(core)
    assert len(collector.token_ids(3)) == 6
    assert_empty(core)


def test_a_prompt_for_another_worker_is_promised_no_pages_of_the_answers() -> None:
    core = _core(num_pages=120)
    request, collector = make_request(PROMPT, n=8, temperature=1.0, max_tokens=300), Collector()
    group = granted(core.add_prefill_only(request, collector))
    run_until_idle(core)
    assert len(collector.outputs) == 8
    core.cancel(group)
    assert_empty(core)


def test_a_search_that_goes_on_with_one_beam_is_promised_the_pages_of_all() -> None:
    core = _core(num_pages=200)
    request = make_request(PROMPT[:4], n=8, use_beam_search=True, max_tokens=12, ignore_eos=True)
    begun = BeamSnapshot(live=(LiveBeam(token_ids=as_tokens([ord("a")]), logprob=0.0),), complete=())
    _group, collector = submit(core, replace(request, beams=begun))
    while core.has_work:
        step(core)
        _promises_cover_needs(core)
    assert len(collector.token_ids(7)) == 12
    assert_empty(core)


def test_transfers_leave_the_window_pages_that_the_first_in_line_waits_for() -> None:
    core = _core(num_pages=125)
    long = [submit(core, make_request(PROMPT * 30, salt=str(i), max_tokens=6))[1] for i in range(2)]
    step(core)
    assert core.load().num_waiting == 1
    short = make_request(PROMPT, max_tokens=6)
    assert isinstance(core.reserve(short, Collector()), Refused)
    landing = core.arrive(make_request(PROMPT * 15).block_hashes)
    assert core.landings.reserve(landing) is not None
    run_until_idle(core)
    assert all(len(collector.token_ids()) == 6 for collector in long)
    core.cancel(granted(core.reserve(short, Collector())))
    assert_empty(core)


def test_behind_the_start_of_a_chunk_no_page_is_needed() -> None:
    chunk = FakeWindow(num_tokens=10 * BLOCK_SIZE, num_pages=200, is_chunk=True)
    core = make_core(num_blocks=400, max_step_tokens=400, max_steps_in_flight=1, window=chunk)
    windows = core.pool.windows
    assert windows is not None
    request = make_request([i % 2 for i in range(30 * BLOCK_SIZE - 2)], max_tokens=30, ignore_eos=True)
    group, collector = submit(core, request)
    needed: dict[int, int] = {}
    while core.has_work:
        step(core)
        if group.sequences[0].block_table:
            needed[group.sequences[0].num_ready // BLOCK_SIZE] = windows.num_needed
    assert collector.token_ids() == expected_tokens(request)
    # The last token of a whole number of blocks may be computed again, for another prompt that ends there.
    assert [needed[num_blocks] for num_blocks in range(29, 35)] == [10, 11, 2, 3, 4, 5]
    assert_empty(core)


def test_more_texts_are_in_work_while_answers_are_written() -> None:
    core = _core(num_pages=150)
    requests = [make_request(PROMPT * 30, salt=str(i), max_tokens=20, ignore_eos=True) for i in range(3)]
    collectors = [submit(core, request)[1] for request in requests]
    step(core)
    assert core.load().num_running == 1
    step(core)
    assert core.load().num_running == 2
    run_until_idle(core)
    assert [collector.token_ids() for collector in collectors] == [expected_tokens(request) for request in requests]
    assert_empty(core)


def test_memory_for_a_block_alone_is_refused_with_the_bytes_of_both_pages() -> None:
    shape = fake_shape(BLOCK_SIZE, FakeWindow(num_tokens=WINDOW, num_pages=1))
    assert num_blocks_for_budget(shape.block_bytes + shape.window_page_bytes, shape) == 1
    with pytest.raises(NoRoomForPages, match=f"63 bytes of KV memory hold no page of {2 * BLOCK_SIZE * 8} bytes"):
        num_blocks_for_budget(2 * BLOCK_SIZE * 8 - 1, shape)
