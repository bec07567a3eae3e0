"""The merge window of a busy router."""

import asyncio

from router.merge_window import BUSY, CALM, MAX_WINDOW_S, MIN_WINDOW_S, MergeWindow


def test_window_grows_while_busy_stays_between_and_shrinks_to_nothing_when_calm() -> None:
    window = MergeWindow()
    window.adapt((BUSY + CALM) / 2)
    assert window.window_s == 0
    seen = []
    for _ in range(6):
        window.adapt(1.0)
        seen.append(window.window_s)
    assert seen == [MIN_WINDOW_S, 2 * MIN_WINDOW_S, 4 * MIN_WINDOW_S, *[MAX_WINDOW_S] * 3]
    window.adapt((BUSY + CALM) / 2)
    assert window.window_s == MAX_WINDOW_S
    for _ in range(4):
        window.adapt(0.0)
    assert window.window_s == 0


async def test_over_without_a_window_returns_at_once() -> None:
    await asyncio.wait_for(MergeWindow().over(), 0.001)


async def test_waiting_clients_share_one_window_that_outlives_one_of_them() -> None:
    window = MergeWindow()
    window.adapt(1.0)
    waiting = [asyncio.create_task(window.over()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not waiting[1].done()
    loop, started_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    await asyncio.gather(*waiting[1:])
    assert 0 < loop.time() - started_s < 1.0
    assert waiting[0].cancelled()
