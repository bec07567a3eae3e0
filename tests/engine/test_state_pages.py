"""Snapshots of recurrent layers' states: where they are, who goes on from them, and what they save in chats."""

import random

import pytest

from common.errors import InvalidRequest, PromptTooLong
from engine.core import EngineCore
from engine.fake_pages import FakeWindow, fake_shape
from engine.kv_store import KvShape, WindowedLayers
from engine.pages.window_pages import STATE_QUOTA, num_pages_beside, split_budget
from tests.builders import BLOCK_SIZE, assert_empty, expected_tokens, make_core, make_request, run_until_idle, submit
from tests.engine.overlap import step


def _core(*, num_pages: int = 60, num_blocks: int = 400, max_step_tokens: int = 64) -> EngineCore:
    state = FakeWindow(num_tokens=1, num_pages=num_pages, is_state=True)
    return make_core(
        num_blocks=num_blocks, max_step_tokens=max_step_tokens, max_steps_in_flight=1, max_model_len=4096, window=state
    )


def _ask(core: EngineCore, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int]:
    """Return an answer, checked, and how many tokens of the prompt were cached."""
    request, before = make_request(prompt, max_tokens=max_tokens, ignore_eos=True), core.scheduler.num_cached_tokens
    _group, collector = submit(core, request)
    run_until_idle(core)
    assert collector.token_ids(0) == expected_tokens(request)
    return collector.token_ids(0), core.scheduler.num_cached_tokens - before


def _text(seed: int, num_tokens: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(32, 127) for i in range(num_tokens)]


@pytest.mark.parametrize("length", [BLOCK_SIZE * 6 + d for d in (-1, 0, 1)])
def test_next_turn_begins_at_the_last_block_of_the_answer_before(length: int) -> None:
    core = _core()
    prompt = _text(1, length)
    answer, _ = _ask(core, prompt, max_tokens=22)
    known = [*prompt, *answer]
    _, num_cached = _ask(core, [*known, *_text(2, 9)])
    assert num_cached == (len(known) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token was never computed
    assert_empty(core)


def test_turn_without_the_answer_begins_at_the_last_block_of_the_prompt() -> None:
    core = _core()
    prompt = _text(1, BLOCK_SIZE * 6 + 2)
    _ask(core, prompt, max_tokens=40)
    _, num_cached = _ask(core, [*prompt, *_text(2, 9)])
    assert num_cached == BLOCK_SIZE * 6


def test_third_prompt_begins_where_the_second_one_left_the_first() -> None:
    core = _core(max_step_tokens=400)
    shared = _text(1, BLOCK_SIZE * 20)
    cached = [_ask(core, [*shared, *_text(seed, 40)])[1] for seed in (2, 3, 4, 5)]
    assert cached == [0, 0, len(shared), len(shared)]


def test_chunks_of_a_long_prompt_leave_snapshots_at_their_ends() -> None:
    core = _core(max_step_tokens=BLOCK_SIZE * 4)
    prompt = _text(1, BLOCK_SIZE * 20)
    _ask(core, prompt)
    _, num_cached = _ask(core, [*prompt[: BLOCK_SIZE * 10], *_text(2, 20)])
    assert num_cached == BLOCK_SIZE * 8


def test_snapshots_inside_of_answers_make_room_for_those_of_prompts() -> None:
    core = _core(num_pages=12)
    prompts = [_text(seed, BLOCK_SIZE * 5) for seed in range(4)]
    for prompt in prompts:
        _ask(core, prompt, max_tokens=BLOCK_SIZE * 20)
    cached = [_ask(core, [*prompt, *_text(9, 5)])[1] for prompt in prompts]
    assert cached == [BLOCK_SIZE * 5] * 4


@pytest.mark.parametrize("has_answers", [True, False], ids=["whole", "without thoughts"])
def test_chats_hit_nine_tenths_of_what_full_attention_would_with_the_same_lengths(has_answers: bool) -> None:
    """Thirty chats of five turns by turns behind four system prompts, with the state pages that a worker has.

    A template that leaves thoughts out of the history puts an answer's end behind the prompt, and not the answer.
    """

    def hit_rate(core: EngineCore) -> float:
        chances = random.Random(7)
        chats = [[*_text(chances.randrange(4), 500), *_text(100 + i, chances.randrange(20, 90))] for i in range(30)]
        num_asked = num_cached = 0
        for turn in range(5):
            for i, text in enumerate(chats):
                answer, num_found = _ask(core, text, max_tokens=chances.randrange(5, 60))
                num_asked, num_cached = num_asked + len(text), num_cached + num_found
                text += answer if has_answers else answer[::-2]
                text += _text(1000 + 100 * turn + i, chances.randrange(10, 200))
        return num_cached / num_asked

    num_blocks = 10_000
    plain = make_core(num_blocks=num_blocks, max_step_tokens=256, max_steps_in_flight=1, max_model_len=4096)
    num_pages = num_pages_beside(
        num_blocks, fake_shape(BLOCK_SIZE, FakeWindow(num_tokens=1, num_pages=1, is_state=True)), 256
    )
    with_states = _core(num_blocks=num_blocks, num_pages=num_pages, max_step_tokens=256)
    rates = hit_rate(plain), hit_rate(with_states)
    assert rates[0] > 0.8
    assert rates[1] >= 0.9 * rates[0], rates


def test_load_tells_the_states_that_are_promised() -> None:
    core = _core(num_pages=12)
    _group, _collector = submit(core, make_request(_text(1, 30), max_tokens=40, ignore_eos=True))
    step(core)
    assert (core.load().num_promised_window_pages, core.load().num_window_pages) == (STATE_QUOTA, 12)
    run_until_idle(core)
    assert core.load().num_promised_window_pages == 0


def test_budget_gives_each_sequence_its_states_and_the_rest_to_both_kinds() -> None:
    shape = KvShape(
        num_layers=48,
        num_kv_heads=2,
        head_dim=256,
        block_size=16,
        dtype="bfloat16",
        row_bytes=512,
        fingerprint="test",
        windowed=WindowedLayers(layers=tuple(i for i in range(48) if (i + 1) % 4), num_tokens=1, state_size=548_864),
    )
    for gib, documented in {1: (10_544, 10), 4: (42_192, 41), 16: (168_816, 164), 64: (675_296, 659)}.items():
        num_blocks, num_pages = split_budget(gib << 30, shape, 2048)
        assert (num_blocks * 16, num_pages) == documented
    assert num_pages == num_blocks * 16 // 1024 > 4 * STATE_QUOTA
    assert 0.99 < (num_blocks * shape.block_bytes + num_pages * shape.window_page_bytes) / (64 << 30) <= 1
    assert num_pages_beside(100, shape, 2048) == 4 * STATE_QUOTA


def test_samples_without_states_and_beams_are_refused_by_name() -> None:
    core = _core(num_pages=8)
    with pytest.raises(PromptTooLong, match="n is 5, which needs 10 state pages; this worker has 8"):
        submit(core, make_request(_text(1, BLOCK_SIZE * 4), n=5, max_tokens=2))
    with pytest.raises(InvalidRequest, match="recurrent layers has no beam search"):
        submit(core, make_request(_text(1, BLOCK_SIZE * 4), n=2, use_beam_search=True, max_tokens=2))
    assert_empty(core)
