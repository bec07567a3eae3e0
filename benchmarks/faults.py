"""Faults of real processes (kill, stop, throttle, cut off), for benchmarks and for stress tests of whole clusters.

Cuts need a network of their own, in which nothing else runs: `PrivateNetwork` moves this process, and all that it
starts afterwards, into one. It needs root, `ip`, and a kernel with routing rules by port.
"""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum

import psutil

_CLONE_NEWNET = 0x40000000
_LOCAL_PREF, _CUT_PREF = "10", "5"
_RUN_S = 0.004


class Fault(StrEnum):
    """Kind of fault that hits a process."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, for good."""
    SLOW = "slow"
    """It runs a small part of the time: SIGSTOP and SIGCONT in turn."""
    HANG = "hang"
    """A step of its engine never ends."""
    CUT = "cut"
    """Nothing reaches its listeners, and nothing comes back from them."""


class CannotInflict(Exception):
    """Raised where the machine cannot do that; the message says why."""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def throttled(pid: int, *, times: float) -> Iterator[None]:
    """Let a process run about one part in `times` of the time while the block runs."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            send(pid, signal.SIGSTOP)
            over.wait((times - 1) * _RUN_S)
            send(pid, signal.SIGCONT)
            over.wait(_RUN_S)

    thread = threading.Thread(target=alternate, name=f"throttle {pid}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(pid, signal.SIGCONT)


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})


class PrivateNetwork:
    """A network that only this process and its children have: a loopback device, with cuts by port."""

    def __init__(self) -> None:
        """Move this process there. Call it before there are threads. Raises CannotInflict."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise CannotInflict(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        try:
            _ip("link", "set", "lo", "up")
            # Local addresses are looked up first of all by default: a cut has to come before.
            _ip("rule", "add", "pref", _LOCAL_PREF, "lookup", "local")
            _ip("rule", "del", "pref", "0")
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotInflict(f"no routing rules: {_reason(error)}") from error

    @contextmanager
    def cut(self, ports: Collection[int], *, to: bool = True, back: bool = True) -> Iterator[None]:
        """Drop what goes `to` these ports, and what comes `back` from them, while the block runs."""
        sides = [side for side, is_cut in (("dport", to), ("sport", back)) if is_cut]
        with ExitStack() as undoing:
            for side in sides:
                for port in ports:
                    rule = ("pref", _CUT_PREF, "ipproto", "tcp", side, str(port), "blackhole")
                    _ip("rule", "add", *rule)
                    undoing.callback(_ip, "rule", "del", *rule)
            yield


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    return error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
