"""A killed vLLM leaves no names in shared memory: they are gone while its processes still use what they name."""

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import multiprocessing, pathlib
from engine.vllm.processes import forget_shared_names

lock = multiprocessing.get_context("spawn").Lock()
name = pathlib.Path("/dev/shm/sem." + lock._semlock.name[1:])
assert name.exists()
forget_shared_names()
assert not name.exists()
forget_shared_names()
with lock:
    pass
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm here")
def test_a_lock_has_no_name_once_it_is_shared_and_its_maker_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
