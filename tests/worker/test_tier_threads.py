"""Threads that may wait for a disk for ever: they work like an executor's, and no process waits for them."""

import subprocess
import sys
import threading

import pytest

from worker.tier_threads import TierThreads

HANGS = """
import threading
from worker.tier_threads import TierThreads
begun = threading.Event()
TierThreads(1, name="hung").submit(lambda: begun.set() or threading.Event().wait())
begun.wait()
"""


def test_a_process_ends_while_a_thread_waits_for_its_disk() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)


def test_results_and_errors_come_back_and_only_so_many_threads_begin() -> None:
    begun: list[str] = []
    threads = TierThreads(2, name="tier", initializer=lambda: begun.append(threading.current_thread().name))
    results = [threads.submit(divmod, i, 2) for i in range(20)]
    assert [result.result(60) for result in results] == [divmod(i, 2) for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(60)
    threads.shutdown()
    assert set(begun) <= {"tier_0", "tier_1"}


def test_calls_that_no_thread_has_begun_are_cancelled_at_the_end() -> None:
    threads, may_go, begun = TierThreads(1, name="tier"), threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return may_go.wait(60)

    first, second = threads.submit(wait), threads.submit(wait)
    assert begun.wait(60)
    threads.shutdown()
    assert second.cancelled()
    with pytest.raises(RuntimeError, match="told to end"):
        threads.submit(wait)
    may_go.set()
    assert first.result(60)
    threads.shutdown()  # once more: harmless
