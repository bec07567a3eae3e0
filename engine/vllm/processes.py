"""Life of the processes that vLLM starts for a worker: they end with it, and leave nothing behind.

vLLM's engine core and its ranks notice by themselves that their parent is gone, and then take half a minute to end.
"""

import glob
import os
import select
import threading
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")
_PYTHON_NAMES = "psm_"
"""Beginning of the names that Python gives to shared memory."""
_EXIT_ORPHANED = 70  # sysexits.h: internal software error


def end_with(pid: int) -> None:
    """End this process as soon as another one is over, by SIGKILL too."""
    if hasattr(os, "pidfd_open"):
        other = os.pidfd_open(pid)
        threading.Thread(target=_await_end, args=(other,), name="end with worker", daemon=True).start()


def _await_end(process: int) -> None:
    select.select([process], [], [])
    forget_shared_names()
    os._exit(_EXIT_ORPHANED)


def forget_shared_names() -> None:
    """Unlink the memory and the locks by which vLLM's processes of one worker talk, once all have mapped them.

    vLLM and Python leave the names behind, and with them the memory, when a process is killed and its helper with it.
    A lock is unlinked by its maker, as at its exit: what a process has mapped does not show the lock's name.
    """
    # Intel's OpenMP registers itself there, once threads have worked together.
    (_SHARED_MEMORY / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)
    group = os.environ.get("VLLM_DIST_IDENT")
    names = set(_SHARED_MEMORY.glob(f"{glob.escape(group)}-*")) if group else set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(f"/{line.partition('/')[2]}")
        if path.parent == _SHARED_MEMORY and path.name.startswith(_PYTHON_NAMES):
            names.add(path)
    for path in names:
        path.unlink(missing_ok=True)  # another rank may have been first
    at_exit: Any = util  # Python has no public way to the names of locks
    lock_type: Any = SemLock
    for finalizer in list(at_exit._finalizer_registry.values()):  # noqa: SLF001
        if finalizer._callback is lock_type._cleanup:  # noqa: SLF001
            finalizer()
