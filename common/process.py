"""Operating-system processes: identity that survives pid reuse, dying with the parent, the ready line, open files.

Both sides of a process boundary import this: services and their launchers.
"""

import ctypes
import gc
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from common.watchdog import Watchdog

EXIT_HUNG = 75
"""Exit status of a process that its own watchdog ends (sysexits.h: a temporary failure)."""

PARENT_PID_ENV = "KVRELAY_PARENT_PID"
"""Set by the launcher of a process with `--die-with-parent`: the pid that has to stay alive."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MIN_RESERVED_FILES = 64
_ASK_TIMEOUT_S = 30.0
_NUM_LISTENERS = 3
"""Listeners of a process: a router has two doors and administration; a worker has control, KV plane and direct door."""

logger = logging.getLogger(__name__)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies for any reason. Call first in main.

    SIGKILL, not SIGTERM: a drain without the rest of the cluster is useless and could hang. Linux only, elsewhere a
    no-op. Exits at once when the parent named by KVRELAY_PARENT_PID died before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = int(os.environ.get(PARENT_PID_ENV, os.getppid()))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "cannot end with the parent process: prctl(PR_SET_PDEATHSIG) failed")
    # The kernel signals only deaths after prctl; an earlier death shows as a changed parent.
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose parent ends. Linux only. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "cannot take over orphans: prctl(PR_SET_CHILD_SUBREAPER) failed")


def _prctl(option: int, value: int, complaint: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), complaint)


def process_birth(pid: int) -> str | None:
    """Return a token that is unique among all processes that ever had this pid, or None without a live process.

    A zombie is not alive. The token is the kernel's start tick and boot id on Linux: wall-clock adjustments do not
    change it, as they do a start time in seconds.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if not sys.platform.startswith("linux"):
            return f"{process.create_time():.3f}"
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (psutil.Error, OSError):
        return None
    # The name, field 2, may hold spaces and parentheses; starttime is field 22.
    start_tick = stat[stat.rindex(b")") + 2 :].split()[19]
    return f"{boot_id}:{start_tick.decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Identity of one process that survives pid reuse."""

    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of a live process, or None."""
        birth = process_birth(pid)
        return cls(pid=pid, birth=birth) if birth is not None else None

    def is_alive(self) -> bool:
        """Return whether this very process still runs."""
        return process_birth(self.pid) == self.birth

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process; return whether it was alive."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Announcement of a service that serves."""

    address: str
    """host:port of a router's door, or of a worker's control."""
    metrics_port: int
    """0: no metrics."""
    pid: int
    admin_address: str
    """host:port for calls of the controller."""
    role: str = ""
    """Present role of a worker, "prefill" or "decode", which may have changed since its start; empty for others."""


class RunningService(Protocol):
    """A service that serves."""

    @property
    def address(self) -> str:
        """Where it serves, host:port."""
        ...

    @property
    def admin_address(self) -> str:
        """Where the controller calls it, host:port."""
        ...

    @property
    def metrics_port(self) -> int:
        """Prometheus port, 0 when off."""
        ...

    @property
    def registry(self) -> "CollectorRegistry":
        """Its metrics, served or not."""
        ...

    @property
    def role(self) -> str:
        """Present role of a worker, "prefill" or "decode"; empty for others."""
        ...

    @property
    def watchdog(self) -> "Watchdog":
        """Ends this process when it hangs, once started."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Drain for up to `grace_s` seconds, then cancel."""
        ...


def ready_of(service: RunningService) -> Ready:
    """Return the announcement of a service of this process that serves."""
    return Ready(
        address=service.address,
        admin_address=service.admin_address,
        metrics_port=service.metrics_port,
        pid=os.getpid(),
        role=service.role,
    )


def spare_loaded_objects() -> None:
    """Have the garbage collector ignore everything that is loaded now, and look less often at what comes later.

    A full collection over the modules of torch and transformers holds a worker up for 0.1 s and more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def ready_line(ready: Ready) -> str:
    """Return the one line that a service prints on stdout when it serves, without the newline."""
    return json.dumps({"event": "ready", **asdict(ready)})


def parse_ready(line: str) -> Ready | None:
    """Return the content of a ready line, or None for any other line. Unknown keys are ignored."""
    entry = _event_of(line)
    if not isinstance(entry, dict) or entry.get("event") != "ready":
        return None
    kinds = {"address": str, "admin_address": str, "metrics_port": int, "pid": int, "role": str}
    fields: dict[str, Any] = {"metrics_port": 0, "role": ""} | {
        name: entry[name] for name in kinds if entry.get(name) is not None
    }
    if not all(isinstance(fields.get(name), kind) for name, kind in kinds.items()):
        return None
    return Ready(**fields)


def describe_exit(code: int) -> str:
    """Return how a process has ended, by its exit status, or minus the signal that killed it."""
    if code == 0:  # no service ends by itself
        return "terminated"
    if code == EXIT_HUNG:
        return f"hung, and ended itself (exit status {code})"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class CannotStart(Exception):
    """A process cannot serve what its configuration asks for; the message says what to do."""

    key = ""
    """Key of serving.yaml that asks for it; empty when the message names it, or there is none."""

    def __init__(self, reason: str, *, key: str | None = None) -> None:
        super().__init__(reason)
        if key is not None:
            self.key = key


def failure_line(failure: CannotStart) -> str:
    """Return the one line that a service prints on stdout instead of a ready line, without the newline."""
    return json.dumps({"event": "failed", "reason": str(failure), "key": failure.key})


def parse_failure(line: str) -> CannotStart | None:
    """Return the content of a failure line, or None for any other line."""
    match _event_of(line):
        case {"event": "failed", "reason": str(reason), "key": str(key)}:
            return CannotStart(reason, key=key)
    return None


def _event_of(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def list_gpus() -> list[str]:
    """Return the GPUs that the driver's tool lists on this host, as CUDA_VISIBLE_DEVICES names them, without torch.

    A card that is cut into MIG slices is replaced by these. Empty without the tool. Takes seconds.
    """
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return _names_of_gpus(listed.stdout)


def _names_of_gpus(listed: str) -> list[str]:
    cards: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if card := re.match(r"GPU (\d+):", line):
            slices = cards.setdefault(card[1], [])
        elif cards and (mig := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)):
            slices.append(mig[1])
    return [name for card, slices in cards.items() for name in slices or [card]]


def claim_open_files() -> int:
    """Raise the process's limit of open files to its maximum and return it. Logs a change."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("limit of open files raised", extra={"before": soft, "after": hard})
    return hard


def connections_per_listener(open_files: int) -> int:
    """Return how many connections each listener of a process may hold within `open_files`.

    A quarter, and at least 64, is reserved for the process itself: calls to workers, files, pipes, metrics.
    """
    return max(1, (open_files - max(_MIN_RESERVED_FILES, open_files // 4)) // _NUM_LISTENERS)
