"""A long text in a model with windows holds pages for the windows, not for all of its tokens."""

from collections.abc import Sequence

from engine.executor import ScheduledSequence, StepHandle
from engine.fake_pages import FakeWindow
from engine.kv_store import KvShape, WindowedLayers
from tests.builders import make_core, make_request, run_until_idle, submit

WINDOW, BLOCK_SIZE, NUM_TOKENS, STEP_TOKENS = 512, 16, 32_768, 512
GEMMA_3_270M = KvShape(
    num_layers=18,
    num_kv_heads=1,
    head_dim=256,
    block_size=BLOCK_SIZE,
    dtype="bfloat16",
    row_bytes=512,
    fingerprint="",
    windowed=WindowedLayers(layers=tuple(i for i in range(18) if (i + 1) % 6), num_tokens=WINDOW),
)


def test_long_text_of_gemma_takes_little_more_than_its_full_layers_and_windows_need() -> None:
    core = make_core(
        num_blocks=NUM_TOKENS // BLOCK_SIZE + 64,
        block_size=BLOCK_SIZE,
        max_step_tokens=STEP_TOKENS,
        max_model_len=NUM_TOKENS + 64,
        window=FakeWindow(num_tokens=WINDOW, num_pages=256),
    )
    prompt = [i % 251 for i in range(NUM_TOKENS)]
    _group, told = submit(core, make_request(prompt, block_size=BLOCK_SIZE, max_tokens=40, ignore_eos=True))
    windows, launch = core.pool.windows, core.executor.launch
    assert windows is not None
    held: dict[bool, list[int]] = {False: [], True: []}

    def note_and_launch(batch: Sequence[ScheduledSequence]) -> StepHandle:
        held[bool(told.outputs)].append(windows.num_needed)
        return launch(batch)

    core.executor.launch = note_and_launch  # type: ignore[method-assign]
    run_until_idle(core)
    most_in_prompt, most_in_answer = max(held[False]), max(held[True])
    assert len(told.outputs) == 40
    assert most_in_prompt > most_in_answer > WINDOW // BLOCK_SIZE
    shape = GEMMA_3_270M
    full_bytes = NUM_TOKENS // BLOCK_SIZE * shape.block_bytes
    needed_bytes = full_bytes + WINDOW // BLOCK_SIZE * shape.window_page_bytes
    assert full_bytes + most_in_prompt * shape.window_page_bytes <= 1.1 * needed_bytes
    assert full_bytes + most_in_answer * shape.window_page_bytes <= 1.01 * needed_bytes
    assert needed_bytes < 0.2 * NUM_TOKENS * shape.bytes_per_token
