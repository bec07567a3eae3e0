"""The host tier: what it returns, in which order blocks go, and what the router hears of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kv_tiers.tiers import Tiers
from tests.tiers.blocks import OTHER, ROOT, data_of, fill, hash_of, held, settings


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    """Four slots of host memory."""
    opened = Tiers.open(settings(host=4))
    yield opened
    opened.close()


def test_block_comes_back_as_it_was_put(tiers: Tiers) -> None:
    fill(tiers, 1, 2)
    assert tiers.get(hash_of(1), ROOT) == data_of(1)
    assert hash_of(1) in tiers and hash_of(3) not in tiers and len(tiers) == 2
    assert tiers.get(hash_of(3), ROOT) is None


def test_another_tenants_root_gets_no_block_and_drops_none(tiers: Tiers) -> None:
    fill(tiers, 1)
    assert tiers.get(hash_of(1), OTHER) is None
    assert tiers.get(hash_of(1), ROOT) == data_of(1)


def test_least_recently_used_block_goes_and_a_leaf_before_its_parent(tiers: Tiers) -> None:
    fill(tiers, 1, 2, 3, 4)
    tiers.touch([hash_of(1), hash_of(2)])  # 1 is the parent of 2
    fill(tiers, 5, 6)
    assert held(tiers) == {1, 2, 5, 6}
    fill(tiers, 7)
    assert held(tiers) == {1, 5, 6, 7}
    fill(tiers, 1)  # is here already: a use
    fill(tiers, 8, 9, 10)
    assert held(tiers) == {1, 8, 9, 10}
    counts = tiers.stats().tiers["host"]
    assert (counts.blocks, counts.capacity, counts.writes, counts.evictions) == (4, 4, 10, 6)


def test_changes_name_what_came_and_went_once(tiers: Tiers) -> None:
    fill(tiers, 1, 2)
    assert tiers.drain_changes() == {hash_of(1): True, hash_of(2): True}
    assert tiers.drain_changes() == {}
    fill(tiers, 3, 4, 5, 6, 7, 8, 9)  # 3, 4 and 5 have come and gone
    assert tiers.drain_changes() == {hash_of(i): i > 2 for i in (1, 2, 6, 7, 8, 9)}


def test_forgotten_tenant_has_no_block_and_others_keep_theirs(tiers: Tiers) -> None:
    fill(tiers, 1, 2)
    fill(tiers, 3, root=OTHER)
    assert tiers.forget(ROOT) == 2
    assert held(tiers) == {3}
    fill(tiers, 4, 5, 6)
    assert held(tiers) == {3, 4, 5, 6}, "their slots are used again"


def test_block_of_a_wrong_size_is_refused(tiers: Tiers) -> None:
    with pytest.raises(ValueError, match="63 bytes"):
        tiers.put(hash_of(1), ROOT, data_of(1)[:-1])


def test_closed_tiers_find_nothing_and_fail_at_nothing(tiers: Tiers) -> None:
    fill(tiers, 1)
    tiers.close()
    fill(tiers, 2)
    tiers.touch([hash_of(1)])
    assert tiers.get(hash_of(1), ROOT) is None and tiers.forget(ROOT) == 0 and len(tiers) == 0


def test_memory_that_cannot_be_had_is_an_alarm() -> None:
    tiers = Tiers.open(settings(host=1 << 56))
    fill(tiers, 1)
    assert len(tiers) == 0
    (alarm,) = tiers.stats().alarms
    assert "cannot have a host tier" in alarm and "; lower tiers.host_gib" in alarm


def test_threads_read_whole_blocks_while_others_evict_and_forget_them(tiers: Tiers) -> None:
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for step in range(2000):
            i = (step * 7 + seed) % 9
            tiers.put(hash_of(i), ROOT, data_of(i))
            got = tiers.get(hash_of(i), ROOT)
            if got is not None and got != data_of(i):
                wrong.append(i)
            if step % 50 == seed:
                tiers.forget(ROOT)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == [] and tiers.stats().tiers["host"].dropped == {}
    assert len(tiers) <= 4
    tiers.forget(ROOT)
    fill(tiers, 1, 2, 3, 4)
    assert held(tiers) == {1, 2, 3, 4}, "no slot is lost"


def test_a_long_prompt_is_touched_in_pieces_between_which_others_read(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tiers, 1, 2, 3, 4)
    read: list[object] = []
    pause = SimpleNamespace(sleep=lambda _seconds: read.append(tiers.get(hash_of(4), ROOT)))
    monkeypatch.setattr("kv_tiers.tier.time", pause)
    monkeypatch.setattr("kv_tiers.tier._AT_ONCE", 1)
    tiers.touch([hash_of(3), hash_of(2), hash_of(1)])
    assert read == [data_of(4)] * 2
    fill(tiers, 5, 6)
    assert held(tiers) == {2, 3, 5, 6}
