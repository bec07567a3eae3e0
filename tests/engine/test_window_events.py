"""KV events of models with window pages, or states: what they say is enough to know how much can be reused."""

import pytest

from common.ids import WorkerId
from common.kv_events import KvEvents
from engine.fake_pages import FakeWindow
from router.fleet.index import PrefixIndex
from tests.builders import BLOCK_SIZE, expected_tokens, make_core, make_request, served, submit
from tests.engine.overlap import step

WORKER = WorkerId("w")


@pytest.mark.parametrize("max_tokens", [1, 9])
@pytest.mark.parametrize(
    "window",
    [
        FakeWindow(num_tokens=8, num_pages=14),
        FakeWindow(num_tokens=10, num_pages=14),
        FakeWindow(num_tokens=10, num_pages=14, is_chunk=True),
        FakeWindow(num_tokens=1, num_pages=14, is_state=True),
    ],
    ids=["window", "uneven window", "chunks", "state"],
)
def test_routers_hear_which_prefixes_have_lost_their_windows(window: FakeWindow, max_tokens: int) -> None:
    core, index = make_core(num_blocks=200, max_step_tokens=6, max_steps_in_flight=1, window=window), PrefixIndex()
    block_window = core.executor.kv.shape.block_window
    texts = [[32 + seed] * (BLOCK_SIZE * 5 + seed % 3) for seed in range(20)]
    lost: set[bool] = set()
    for text in texts:
        submit(core, make_request(text, max_tokens=max_tokens, ignore_eos=True))
        while core.has_work:
            step(core)
            index.apply(WORKER, core.report().kv_events, window=block_window)
        fresh = PrefixIndex()
        fresh.apply(WORKER, core.snapshot(), window=block_window)
        for known in texts:
            hashes = make_request(known).block_hashes
            usable = core.pool.num_usable(hashes, len(hashes))
            assert index.match(hashes, num_usable=len(hashes)).longest == usable
            assert fresh.match(hashes, num_usable=len(hashes)).longest == usable
            assert index.match(hashes).longest == core.pool.num_matching(hashes, len(hashes))
            if index.match(hashes):
                lost.add(usable < len(hashes))
    assert lost == {False, True}


def test_models_without_window_pages_say_nothing_of_them() -> None:
    core = make_core()
    served(core, make_request(range(20)))
    for events in (core.snapshot(), core.report().kv_events):
        assert events == KvEvents(stored=events.stored, is_snapshot=events.is_snapshot)
        assert len(events.stored) >= 5


@pytest.mark.parametrize("num_tokens", [8, 1], ids=["window", "state"])
def test_forgotten_blocks_leave_with_their_windows(num_tokens: int) -> None:
    window = FakeWindow(num_tokens=num_tokens, num_pages=14, is_state=num_tokens == 1)
    core = make_core(max_step_tokens=6, window=window)
    ours, theirs = make_request(range(20)), make_request(range(20), salt="other")
    served(core, ours)
    served(core, theirs)
    core.report()
    forgotten = core.forget(ours.hash_root)
    events, kept = core.report().kv_events, core.snapshot()
    assert len(events.removed) == forgotten.num_blocks >= len(ours.block_hashes)
    assert set(events.removed) >= set(ours.block_hashes)
    assert not set(kept.stored) & set(events.removed)
    assert set(kept.paged) <= set(kept.stored) >= set(theirs.block_hashes)
    assert served(core, ours).token_ids() == expected_tokens(ours)
