"""Work in a child process fails alone."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from common.sandbox import Sandbox, SandboxFailed

MODULE = "tests.common.sandboxed"
TIMEOUT_S = 60.0
_PARENT = f"""
import sys
from common.sandbox import Sandbox
print(Sandbox({MODULE!r}).ask(b"pid", within_s={TIMEOUT_S}).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(MODULE)
    yield sandbox
    sandbox.close()


def test_requests_are_answered_by_one_child_whatever_their_size(sandbox: Sandbox) -> None:
    pid = sandbox.ask(b"pid", within_s=TIMEOUT_S)
    for request in (b"", b"x", b"y" * (4 << 20)):
        assert sandbox.ask(request, within_s=TIMEOUT_S) == request
    assert sandbox.ask(b"pid", within_s=TIMEOUT_S) == pid


@pytest.mark.parametrize("work", [b"crash", b"spin", b"eat"])
def test_work_that_ends_its_child_fails_and_the_next_one_succeeds(sandbox: Sandbox, work: bytes) -> None:
    with pytest.raises(SandboxFailed):
        sandbox.ask(work, within_s=TIMEOUT_S)
    assert sandbox.ask(b"more", within_s=TIMEOUT_S) == b"more"


def test_work_that_hangs_is_given_up_with_its_child(sandbox: Sandbox) -> None:
    child = psutil.Process(int(sandbox.ask(b"pid", within_s=TIMEOUT_S)))
    with pytest.raises(TimeoutError):
        sandbox.ask(b"hang", within_s=0.05)
    assert not child.is_running()
    assert sandbox.ask(b"more", within_s=TIMEOUT_S) == b"more"


def test_child_ends_when_it_is_closed_twice_too(sandbox: Sandbox) -> None:
    child = psutil.Process(int(sandbox.ask(b"pid", within_s=TIMEOUT_S)))
    sandbox.close()
    sandbox.close()
    assert not child.is_running()


def test_child_does_not_outlive_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(TIMEOUT_S)
