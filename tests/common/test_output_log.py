"""Full logs are rotated while processes write to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.log import (
    LOG_PATH_ENV,
    MAX_LOG_BYTES,
    NUM_OLD_LOGS,
    old_log,
    open_log,
    rotate_log,
    rotate_output,
    watch_output,
)

WRITER = """
import ctypes, os, sys
from pathlib import Path
from common.log import rotate_output
log = Path(sys.argv[1])
libc = ctypes.CDLL(None)
for number in range(6):
    libc.dprintf(2, b"from C %d\\n", number)
    print("from Python", number, file=sys.stderr)
    if number % 2:
        rotated = rotate_output(log, max_bytes=1)
        os.write(1, b"rotated\\n" if rotated else b"left\\n")
"""


def write_to(stderr: "int | None", log: Path) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", WRITER.replace("\\\\", "\\"), str(log)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        check=True,
    )
    return done.stdout


def test_no_line_of_python_or_c_is_lost_or_reordered_by_rotation(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "router-0.log"
    with open_log(log) as file:
        assert write_to(file.fileno(), log) == b"rotated\n" * 3
    files = [*(old_log(log, number) for number in (3, 2, 1)), log]
    lines = "".join(file.read_text() for file in files).splitlines()
    assert lines == [f"from {who} {number}" for number in range(6) for who in ("C", "Python")]
    assert [len(file.read_text().splitlines()) for file in files] == [4, 4, 4, 0]


def test_output_to_another_file_is_not_rotated(tmp_path: Path) -> None:
    log = tmp_path / "router-0.log"
    log.write_text("of another process\n")
    with (tmp_path / "mine").open("wb") as mine:
        assert write_to(mine.fileno(), log) == b"left\n" * 3
    assert log.read_text() == "of another process\n"
    assert not old_log(log, 1).exists()
    assert not rotate_output(tmp_path / "nothing", max_bytes=1)


def test_oldest_log_is_deleted(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for number in range(NUM_OLD_LOGS + 3):
        log.write_text(str(number))
        assert rotate_log(log, max_bytes=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"x.log.{n}" for n in range(1, NUM_OLD_LOGS + 1)]
    assert old_log(log, 1).read_text() == str(NUM_OLD_LOGS + 2)


def test_full_log_of_a_crashing_process_is_rotated_at_its_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.touch()
    os.truncate(log, MAX_LOG_BYTES)
    open_log(log).close()
    assert (log.stat().st_size, old_log(log, 1).stat().st_size) == (0, MAX_LOG_BYTES)


def test_child_processes_do_not_inherit_the_name_of_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LOG_PATH_ENV, str(tmp_path / "x.log"))
    watch_output()
    assert LOG_PATH_ENV not in os.environ
