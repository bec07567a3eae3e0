"""A tenant's blocks on disk can be forgotten: overwritten, also where a process that has ended left them."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faulty_files import FaultyFiles, failing
from kv_tiers.health import RETRY_S
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers
from tests.clock import ManualClock
from tests.tiers.blocks import OTHER, ROOT, SLOT_BYTES, fill, held, on_disk, readable, settings


def fail_once_writing_blocks() -> Callable[[Path, int], None]:
    """Return a hook by which the first write of a block fails."""
    is_due = [True]

    def fail(path: Path, num_bytes: int) -> None:
        if is_due[0] and path.name == "blocks":
            is_due[0] = False
            raise OSError(errno.EIO, "injected")

    return fail


def is_blank(path: Path, n: int, slot: int) -> bool:
    """Return whether a slot and its record are zeros."""
    (store,) = path.iterdir()
    index, blocks = ((store / str(n) / name).read_bytes() for name in ("index", "blocks"))
    record, block = (
        content[slot * size : (slot + 1) * size] for content, size in ((index, RECORD_BYTES), (blocks, SLOT_BYTES))
    )
    return not any(record) and not any(block)


def test_forgotten_blocks_are_overwritten_and_others_stay(tmp_path: Path) -> None:
    tiers = Tiers.open(settings(host=2, disk=4, path=tmp_path))
    fill(tiers, 1, 2)
    fill(tiers, 3, root=OTHER)
    assert tiers.forget(ROOT) == 2
    assert held(tiers) == {3} and readable(tiers, [3], OTHER) == {3}
    assert [is_blank(tmp_path, 0, slot) for slot in range(4)] == [True, True, False, True]
    fill(tiers, 4, 5, 6)
    assert held(tiers) == {3, 4, 5, 6}
    tiers.close()


def test_blocks_that_an_ended_process_left_are_forgotten_too(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    fill(first, 1)
    fill(second, 2, 3)
    second.close()
    assert first.forget(ROOT) == 3
    assert is_blank(tmp_path, 1, 0) and is_blank(tmp_path, 1, 1)
    first.close()


def test_blocks_forgotten_while_the_disk_was_off_do_not_come_back(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, 40, files, clock)
    fill(tiers, *range(20))
    files.before_write = failing(errno.EIO)
    fill(tiers, *range(20, 30))
    assert "is off" in tiers.stats().alarms[0]
    files.before_read = failing(errno.EIO)
    tiers.forget(ROOT)
    files.before_write = files.before_read = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    fill(tiers, 50)
    assert held(tiers) == {50}
    tiers.close()


def test_blocks_to_forget_that_resist_keep_the_disk_off_until_they_are_gone(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, 1)
    files.before_write = failing(errno.EIO)
    assert tiers.forget(ROOT) == 1
    assert "remove them yourself" in tiers.stats().alarms[0]
    clock.advance(RETRY_S)
    fill(tiers, 2)
    assert held(tiers) == set() and tiers.stats().alarms
    files.before_write = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    fill(tiers, 3)
    assert held(tiers) == {3} and tiers.stats().alarms == ()
    tiers.close()


def test_what_cannot_be_overwritten_is_removed_with_everything(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, 1, 2)
    fill(tiers, 3, root=OTHER)
    files.before_write = fail_once_writing_blocks()
    assert tiers.forget(ROOT) == 2
    assert "all were removed" in tiers.stats().alarms[0]
    files.before_write = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    fill(tiers, 4)
    assert held(tiers) == {4}
    tiers.close()


@pytest.mark.parametrize("fault", ["read", "evict", "full"])
def test_a_block_that_a_failing_disk_kept_is_forgotten_once_it_can_be_overwritten(tmp_path: Path, fault: str) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, 1)
    fill(tiers, 2, 3, 4, root=OTHER)
    files.before_write = failing(errno.ENOSPC if fault == "full" else errno.EIO)
    if fault == "read":
        files.before_read = failing(errno.EIO)
        assert readable(tiers, [1]) == set(), "it is dropped, and cannot be overwritten"
    else:
        fill(tiers, 5, root=OTHER)  # in its place, which is not written
    files.before_write = files.before_read = lambda path, num_bytes: None
    tiers.forget(ROOT)
    assert is_blank(tmp_path, 0, 0)
    clock.advance(RETRY_S)
    fill(tiers, 6, root=OTHER)
    assert held(tiers) == {2, 3, 4, 6}, "its place is used again"
    tiers.close()
    after = on_disk(tmp_path)
    assert held(after) == {2, 3, 4, 6}
    after.close()


def test_a_place_whose_old_block_is_forgotten_while_it_is_written_is_overwritten(tmp_path: Path) -> None:
    files = FaultyFiles()
    tiers = on_disk(tmp_path, 1, files)
    fill(tiers, 1)

    def forget_and_fail(path: Path, num_bytes: int) -> None:
        files.before_write = lambda path, num_bytes: None
        tiers.forget(ROOT)
        raise OSError(errno.EIO, "injected")

    files.before_write = forget_and_fail
    fill(tiers, 2, root=OTHER)
    assert is_blank(tmp_path, 0, 0)
    fill(tiers, 3, root=OTHER)
    assert held(tiers) == {3}
    tiers.close()
