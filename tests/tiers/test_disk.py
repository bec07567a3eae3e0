"""The disk tier: what survives a restart, what is found and dropped, and what a disk that fails costs."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faulty_files import FaultyFiles, Killed, failing
from kv_tiers.health import MAX_FAULTS_IN_A_ROW, RETRY_S, SLOW_S
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers
from tests.clock import ManualClock
from tests.tiers.blocks import (
    BLOCK_BYTES,
    OTHER,
    ROOT,
    SLOT_BYTES,
    data_of,
    fill,
    hash_of,
    held,
    on_disk,
    readable,
    settings,
)


def folder_of(path: Path, n: int = 0) -> Path:
    (store,) = path.iterdir()
    return store / str(n)


def dropped(tiers: Tiers) -> dict[str, int]:
    return dict(tiers.stats().tiers["disk"].dropped)


def change(file: Path, offset: int, change_byte: Callable[[int], int]) -> None:
    content = bytearray(file.read_bytes())
    content[offset] = change_byte(content[offset])
    file.write_bytes(content)


def test_restarted_process_finds_blocks_and_their_order(tmp_path: Path) -> None:
    before = on_disk(tmp_path)
    fill(before, 1, 2, 3, 4)
    before.touch([hash_of(1), hash_of(2)])
    before.close()
    after = on_disk(tmp_path)
    assert held(after) == {1, 2, 3, 4} and set(after.drain_changes().values()) == {True}
    fill(after, 5, 6, 7)
    assert readable(after, range(9)) == {1, 5, 6, 7}
    assert dropped(after) == {}
    after.close()


def test_block_in_host_memory_and_on_disk_is_one_and_comes_back_from_disk_once(tmp_path: Path) -> None:
    tiers = Tiers.open(settings(host=2, disk=4, path=tmp_path))
    fill(tiers, 1, 2, 3)
    assert len(tiers) == 3 and tiers.drain_changes() == {hash_of(i): True for i in (1, 2, 3)}
    assert readable(tiers, [1]) == {1}
    assert readable(tiers, [1]) == {1}
    counts = tiers.stats().tiers
    assert (counts["disk"].hits, counts["host"].hits, counts["host"].misses) == (1, 1, 1)
    assert tiers.drain_changes() == {}, "what the host tier evicts is still on disk"
    tiers.close()


@pytest.mark.parametrize("offset", range(0, RECORD_BYTES, 3))
def test_flipped_bit_anywhere_in_a_record_costs_its_block_alone(tmp_path: Path, offset: int) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 1, 2)
    tiers.close()
    change(folder_of(tmp_path) / "index", offset, lambda byte: byte ^ 1 << offset % 8)
    tiers = on_disk(tmp_path)
    assert readable(tiers, range(9)) == {2}
    assert dropped(tiers) == {"corrupt": 1}
    tiers.close()
    tiers = on_disk(tmp_path)
    assert dropped(tiers) == {}, "it is cleared"
    tiers.close()


@pytest.mark.parametrize("offset", range(0, BLOCK_BYTES, 7))
def test_flipped_bit_of_a_block_is_found_when_it_is_read(tmp_path: Path, offset: int) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 1, 2)
    tiers.drain_changes()
    change(folder_of(tmp_path) / "blocks", SLOT_BYTES + offset, lambda byte: byte ^ 0x40)
    assert readable(tiers, range(9)) == {1}
    assert dropped(tiers) == {"flipped": 1}
    assert tiers.drain_changes() == {hash_of(2): False}
    fill(tiers, 2)
    assert readable(tiers, [2]) == {2}
    tiers.close()


def test_swapped_records_and_swapped_bytes_are_not_served(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 1, 2, 3, 4)
    tiers.close()
    index, blocks = folder_of(tmp_path) / "index", folder_of(tmp_path) / "blocks"
    records, content = index.read_bytes(), blocks.read_bytes()
    index.write_bytes(records[RECORD_BYTES : 2 * RECORD_BYTES] + records[:RECORD_BYTES] + records[2 * RECORD_BYTES :])
    blocks.write_bytes(content[: 2 * SLOT_BYTES] + content[3 * SLOT_BYTES :] + content[2 * SLOT_BYTES : 3 * SLOT_BYTES])
    tiers = on_disk(tmp_path)
    assert dropped(tiers) == {"swapped": 2}
    assert readable(tiers, range(9)) == set()
    assert dropped(tiers) == {"swapped": 2, "flipped": 2}
    tiers.close()


@pytest.mark.parametrize("name, unit", [("index", RECORD_BYTES), ("blocks", SLOT_BYTES)])
@pytest.mark.parametrize("length", [0, 1, 1.5, 2])
def test_truncated_file_costs_what_lay_behind_its_end(tmp_path: Path, name: str, unit: int, length: float) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 1, 2)
    tiers.close()
    os.truncate(folder_of(tmp_path) / name, int(length * unit))
    tiers = on_disk(tmp_path)
    whole = int(length + 0.9) if name == "blocks" else int(length)  # half a slot is all of a block and padding
    assert readable(tiers, range(9)) == set(range(1, whole + 1))
    assert sum(dropped(tiers).values()) == (2 - whole if name == "blocks" else length == 1.5)
    tiers.close()


def test_file_truncated_meanwhile_is_found_when_it_is_read(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 1, 2)
    os.truncate(folder_of(tmp_path) / "blocks", SLOT_BYTES + 1)
    assert readable(tiers, range(9)) == {1}
    assert dropped(tiers) == {"truncated": 1}
    tiers.close()


@pytest.mark.parametrize("num_writes", range(9))
def test_process_killed_at_any_write_leaves_no_wrong_block(tmp_path: Path, num_writes: int) -> None:
    files = FaultyFiles()
    tiers = on_disk(tmp_path, 2, files)
    fill(tiers, 1, 2)
    left = [num_writes]

    def kill_or_tear(path: Path, num_bytes: int) -> int:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return 50  # bytes at most

    files.before_write = kill_or_tear
    with pytest.raises(Killed):
        fill(tiers, 3, 4)
    files.kill()
    tiers = on_disk(tmp_path, 2)
    assert readable(tiers, range(9)) in ({1, 2}, {2}, {2, 3})
    fill(tiers, 5, 6)
    assert readable(tiers, range(9)) == {5, 6}
    tiers.close()


def test_short_reads_and_writes_go_on(tmp_path: Path) -> None:
    files = FaultyFiles()
    tiers = on_disk(tmp_path, files=files)
    files.before_write = files.before_read = lambda path, num_bytes: 7
    fill(tiers, 1, 2)
    assert readable(tiers, [1, 2]) == {1, 2}
    tiers.close()


def test_full_disk_keeps_what_is_there_and_takes_blocks_again_later(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, 1, 2)
    files.before_write = failing(errno.ENOSPC)
    fill(tiers, 3)
    assert readable(tiers, range(9)) == {1, 2}
    assert "no more blocks" in tiers.stats().alarms[0] and dropped(tiers) == {"full": 1}
    files.before_write = lambda path, num_bytes: None
    fill(tiers, 4)
    assert readable(tiers, range(9)) == {2, 4}, "space that is allocated is used"
    clock.advance(RETRY_S)
    fill(tiers, 5, 6)
    assert readable(tiers, range(9)) == {2, 4, 5, 6} and tiers.stats().alarms == ()
    tiers.close()


@pytest.mark.parametrize("fail_writes", [True, False])
def test_failing_disk_is_turned_off_and_found_again(tmp_path: Path, *, fail_writes: bool) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, 3 * MAX_FAULTS_IN_A_ROW, files, clock)
    fill(tiers, *range(2 * MAX_FAULTS_IN_A_ROW))
    tiers.drain_changes()
    if fail_writes:
        files.before_write = failing(errno.EIO)
        fill(tiers, *range(100, 100 + MAX_FAULTS_IN_A_ROW))
    else:
        files.before_read = failing(errno.EIO)
        assert readable(tiers, range(MAX_FAULTS_IN_A_ROW)) == set()
    assert "the disk tier is off" in tiers.stats().alarms[0]
    assert len(tiers) == 0 and not any(tiers.drain_changes().values())
    assert dropped(tiers) == {"io_error": MAX_FAULTS_IN_A_ROW}
    fill(tiers, 50)
    assert len(tiers) == 0
    files.before_write = files.before_read = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    fill(tiers, 50)
    assert readable(tiers, range(100)) >= {*range(MAX_FAULTS_IN_A_ROW, 2 * MAX_FAULTS_IN_A_ROW), 50}
    assert tiers.stats().alarms == ()
    tiers.close()


def test_blocks_that_only_host_memory_took_go_to_disk_once_it_is_back(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = Tiers.open(settings(host=5, disk=20, path=tmp_path), files=files, clock=clock)
    files.before_write = failing(errno.EIO)
    fill(tiers, *range(MAX_FAULTS_IN_A_ROW))
    assert "the disk tier is off" in tiers.stats().alarms[0]
    fill(tiers, 40, root=OTHER)
    assert tiers.num_behind == 0
    tiers.catch_up(20)
    tiers.forget(OTHER)
    files.before_write = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    fill(tiers, 50)
    assert held(tiers) == {4, 5, 6, 7, 50}, "as many as host memory has"
    assert tiers.num_behind == 4
    tiers.catch_up(3)
    assert tiers.num_behind == 1
    tiers.catch_up(3)
    assert (tiers.num_behind, tiers.stats().tiers["host"].hits) == (0, 0)
    tiers.close()
    again = on_disk(tmp_path, 20)
    assert readable(again, range(99)) == held(again) == {4, 5, 6, 7, 50}
    again.close()


def test_slow_disk_is_turned_off_too(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, 20, files, clock)
    fill(tiers, *range(20))

    def wait(path: Path, num_bytes: int) -> None:
        clock.advance(2 * SLOW_S)

    files.before_read = wait
    assert readable(tiers, range(20)) == set(range(MAX_FAULTS_IN_A_ROW)), "what was read so far is right"
    assert dropped(tiers) == {"slow": MAX_FAULTS_IN_A_ROW} and tiers.stats().alarms
    tiers.close()


def test_others_get_at_the_books_while_a_large_tier_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = on_disk(tmp_path, 8)
    fill(tiers, *range(7))
    tiers.drain_changes()
    seen = []
    monkeypatch.setattr("kv_tiers.tier._AT_ONCE", 2)
    monkeypatch.setattr("kv_tiers.tier.time.sleep", lambda _s: seen.append((len(tiers), tiers.get(hash_of(0), ROOT))))
    tiers.close()
    assert seen == [(5, None), (3, None), (1, None)]
    assert tiers.drain_changes() == dict.fromkeys(map(hash_of, range(7)), False)


def test_vanished_folder_is_an_alarm_and_is_made_anew(tmp_path: Path) -> None:
    clock = ManualClock()
    tiers = on_disk(tmp_path / "tiers", clock=clock)
    fill(tiers, 1)
    shutil.rmtree(tmp_path / "tiers")
    fill(tiers, 2)
    assert "removed" in tiers.stats().alarms[0] and len(tiers) == 0
    clock.advance(RETRY_S)
    fill(tiers, 3)
    assert readable(tiers, range(9)) == {3} and tiers.stats().alarms == ()
    tiers.close()


def test_folder_that_loses_its_lock_is_left_to_the_process_that_takes_it(tmp_path: Path) -> None:
    first = on_disk(tmp_path)
    fill(first, 1)
    (folder_of(tmp_path) / "lock").unlink()
    second = on_disk(tmp_path)
    fill(first, 2)
    assert len(first) == 0 and first.stats().alarms
    fill(second, 3)
    assert readable(second, range(9)) == {1, 3}
    first.close()
    second.close()


@pytest.mark.parametrize("host", [0, 2])
def test_threads_on_a_failing_disk_get_whole_blocks_or_none(tmp_path: Path, host: int) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = Tiers.open(settings(host=host, disk=6, path=tmp_path), files=files, clock=clock)
    files.before_write = files.before_read = flaky(random.Random(host))

    def work(seed: int) -> set[int]:
        for step in range(300):
            numbers = [(step * 7 + seed + i) % 11 + 1 for i in range(3)]
            fill(tiers, *numbers)
            tiers.touch([hash_of(i) for i in numbers])
            readable(tiers, numbers)
            if step % 40 == seed:
                tiers.forget(ROOT)
            clock.advance(1.0)
        return set(numbers)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    files.before_write = files.before_read = lambda path, num_bytes: None
    clock.advance(RETRY_S)
    tiers.forget(ROOT)
    fill(tiers, *range(50, 56))
    assert readable(tiers, range(100)) == set(range(50, 56)), "no slot is lost"
    tiers.drain_changes()
    assert len(tiers) == len(tiers.snapshot()) == 6
    tiers.close()


def flaky(rng: random.Random) -> Callable[[Path, int], int | None]:
    """Return a hook by which one call in ten fails, and one is short."""

    def fail(path: Path, num_bytes: int) -> int | None:
        draw = rng.random()
        if draw < 0.1:
            raise OSError(rng.choice([errno.EIO, errno.ENOSPC]), "injected")
        return rng.randint(1, max(1, num_bytes)) if draw < 0.2 else None

    return fail


def test_nothing_can_be_read_at_rest_or_by_another_tenant(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path)
    fill(tiers, 77)
    assert readable(tiers, [77], OTHER) == set()
    assert readable(tiers, [77]) == {77} and dropped(tiers) == {}
    for file in folder_of(tmp_path).iterdir():
        content = file.read_bytes()
        assert bytes(data_of(77)[:16]) not in content and bytes(ROOT) not in content
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    tiers.close()


def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    fill(first, 1)
    fill(second, 2)
    first.close()
    third = on_disk(tmp_path)
    assert (readable(third, range(9)), readable(second, range(9))) == ({1}, {2})
    second.close()
    third.close()


def test_blocks_of_another_model_are_removed_unless_a_process_uses_them(tmp_path: Path) -> None:
    foreign = tmp_path / "0123456789abcdef" / "0"
    foreign.mkdir(parents=True)
    (foreign / "index").write_bytes(b"a user's own file")
    used, unused = (Tiers.open(settings(disk=4, path=tmp_path, fingerprint=name)) for name in ("used", "unused"))
    fill(used, 1)
    fill(unused, 2, 3)
    unused.close()
    tiers = on_disk(tmp_path)
    assert dropped(tiers) == {"stale": 2} and held(tiers) == set()
    assert readable(used, [1]) == {1} and len(list(tmp_path.iterdir())) == 3
    assert (foreign / "index").read_bytes() == b"a user's own file"
    used.close()
    tiers.close()


@pytest.mark.parametrize("number", range(3))
def test_copy_of_another_models_index_is_stale(tmp_path: Path, number: int) -> None:
    for name, each in (("f", tmp_path / "f"), ("g", tmp_path / "g")):
        tiers = Tiers.open(settings(disk=4, path=each, fingerprint=name))
        fill(tiers, 1, 2, 3)
        tiers.close()
    (folder_of(tmp_path / "f") / "index").write_bytes((folder_of(tmp_path / "g") / "index").read_bytes())
    tiers = on_disk(tmp_path / "f")
    assert dropped(tiers) == {"stale": 3} and held(tiers) == set()
    tiers.close()


def test_old_index_beside_newer_blocks_serves_only_what_is_still_there(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path, 2)
    fill(tiers, 1, 2)
    old = (folder_of(tmp_path) / "index").read_bytes()
    fill(tiers, 3)
    tiers.close()
    (folder_of(tmp_path) / "index").write_bytes(old)
    tiers = on_disk(tmp_path, 2)
    assert readable(tiers, range(9)) == {2} and dropped(tiers) == {"flipped": 1}
    tiers.close()


def test_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    tiers = on_disk(path)
    fill(tiers, 1)
    assert "other users may write there" in tiers.stats().alarms[0]
    assert len(tiers) == 0 and list(path.iterdir()) == []
    tiers.close()


def test_path_that_is_a_file_is_an_alarm_and_host_memory_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tiers = Tiers.open(settings(host=1, disk=4, path=tmp_path / "file"))
    fill(tiers, 1)
    assert f"the disk tier is off: tiers.path: {tmp_path / 'file'}: File exists;" in tiers.stats().alarms[0]
    assert readable(tiers, [1]) == {1} and tiers.stats().tiers["disk"].capacity == 0
    tiers.close()


def test_size_below_a_block_is_an_alarm(tmp_path: Path) -> None:
    tiers = Tiers.open(replace(settings(path=tmp_path), disk_bytes=SLOT_BYTES))
    assert "less than a block" in tiers.stats().alarms[0]
    tiers.close()


def test_smaller_size_keeps_the_blocks_that_fit(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path, 4)
    fill(tiers, 1, 2, 3, 4)
    tiers.close()
    tiers = on_disk(tmp_path, 2)
    assert readable(tiers, range(9)) == {1, 2} and tiers.stats().tiers["disk"].capacity == 2
    tiers.close()


class BadSector(FaultyFiles):
    """Files of which one slot cannot be written."""

    is_bad = True

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.is_bad and self._paths[fd].name == "blocks" and offset == 2 * SLOT_BYTES:
            raise OSError(errno.EIO, "injected")
        return super().write(fd, data, offset)


def test_a_bad_sector_costs_its_slot_and_no_other(tmp_path: Path) -> None:
    files, clock = BadSector(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, *range(1, 30))
    assert held(tiers) == {27, 28, 29}
    assert dropped(tiers) == {"io_error": 1} and tiers.stats().alarms == ()
    clock.advance(RETRY_S)
    fill(tiers, 30, 31)
    assert held(tiers) == {28, 29, 31} and dropped(tiers) == {"io_error": 2}, "it is tried again"
    files.is_bad = False
    clock.advance(RETRY_S)
    fill(tiers, 32)
    assert held(tiers) == {28, 29, 31, 32}
    tiers.close()


def test_a_slot_that_could_not_be_written_is_used_again_when_there_is_no_other(tmp_path: Path) -> None:
    files = FaultyFiles()
    tiers = on_disk(tmp_path, 1, files)
    files.before_write = failing(errno.EIO)
    fill(tiers, 1)
    files.before_write = lambda path, num_bytes: None
    fill(tiers, 2)
    assert held(tiers) == {2}
    tiers.close()


def test_a_disk_that_is_full_again_and_again_loses_no_slots(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tiers = on_disk(tmp_path, files=files, clock=clock)
    fill(tiers, 1, 2, 3, 4)
    for i in range(5, 9):
        files.before_write = failing(errno.ENOSPC)
        fill(tiers, i)
        clock.advance(RETRY_S)
    files.before_write = lambda path, num_bytes: None
    fill(tiers, 11, 12, 13, 14)
    assert held(tiers) == {11, 12, 13, 14}
    tiers.close()
