"""Stops clusters, for the command line, whatever has become of their files, their supervisor or Ray.

Processes are signalled by identity, never by pid alone. What may still run is never taken for gone: then the message
names it, and state.json stays. Imports neither torch nor Ray.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil

from cluster.processes.run_dir import RunDirTaken, lock_run_dir
from cluster.processes.starter import Report
from cluster.processes.state import ClusterPhase, ClusterState, StateFile
from cluster.ray import outside
from cluster.resolving import ClusterError
from common.errors import KvrelayError
from common.process import ProcessIdentity

_STOP_TIMEOUT_S = 60.0
_DEATH_TIMEOUT_S = 5.0
_POLL_S = 0.02


def down(run_dir: Path, *, report: Report) -> bool:
    """Stop the cluster of a folder and return whether there was one. Blocks until all its processes are gone.

    Also removes the processes that a killed supervisor left, and, without a state but with RAY_ADDRESS, the Ray actors
    of a cluster named like the folder. Raises ClusterError, with what may still run, if a process does not die or Ray
    does not answer.
    """
    run_dir = run_dir.expanduser().resolve()
    state_file = StateFile(run_dir)
    state = state_file.read()
    if state is None:
        return _stop_without_state(run_dir, report)
    if not state.supervisor.is_alive():
        removed = _remove_from_ray(state.name, state_file, report)
        return clean_up(state_file, report) or removed
    drains = "the router drains" if len(state.addresses) == 1 else "the routers drain"
    report(f"stopping the cluster on {', '.join(state.addresses)}: {drains} first")
    if not _ask_to_stop(state, run_dir, report) or _alive_after([state.supervisor], _STOP_TIMEOUT_S):
        report("the supervisor does not stop: killing it")
        if not _remove_from_ray(state.name, state_file, report):
            state.supervisor.signal(signal.SIGKILL)
        _alive_after([state.supervisor], _DEATH_TIMEOUT_S)
    clean_up(state_file, report)
    report("stopped")
    return True


def _ask_to_stop(state: ClusterState, run_dir: Path, report: Report) -> bool:
    """Ask the supervisor to stop the cluster; False if it does not answer.

    Ray would restart an actor that is ended by a signal.
    """
    if not state.ray_environment:
        return state.supervisor.signal(signal.SIGTERM)
    from cluster.control import stop  # gRPC

    try:
        stop(run_dir)
    except KvrelayError as error:
        report(f"the controller does not answer: {error}")
        return False
    return True


def _stop_without_state(run_dir: Path, report: Report) -> bool:
    """Stop a cluster whose state.json, or whole run folder, has vanished, as far as it can be found."""
    supervisor = _find_supervisor(run_dir)
    if supervisor is None:
        removed = _remove_from_ray(run_dir.name, StateFile(run_dir), report)
        if not removed and _is_locked(run_dir):
            raise ClusterError(
                f"cannot stop the cluster of {run_dir}: a supervisor holds its lock, but there is no state.json;"
                " set RAY_ADDRESS to the Ray cluster in which it runs, and repeat"
            )
        return removed
    report(f"{run_dir} has no state.json, but its supervisor ({supervisor.pid}) runs: stopping it")
    supervisor.signal(signal.SIGTERM)
    if _alive_after([supervisor], _STOP_TIMEOUT_S):
        report("the supervisor does not stop: killing it")
        supervisor.signal(signal.SIGKILL)  # its processes die with it
        if _alive_after([supervisor], _DEATH_TIMEOUT_S):
            raise ClusterError(f"cannot stop the cluster of {run_dir}: process {supervisor.pid} does not die")
    report("stopped")
    return True


def _find_supervisor(run_dir: Path) -> ProcessIdentity | None:
    """Return this user's supervisor of a run folder by its command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and _supervises(process.cmdline(), run_dir):
                identity = ProcessIdentity.of(process.pid)
                # Again: the pid may have got another owner before its identity was read.
                if identity is not None and _supervises(psutil.Process(process.pid).cmdline(), run_dir):
                    return identity
    return None


def _supervises(words: list[str], run_dir: Path) -> bool:
    pairs = list(pairwise(words))
    return ("-m", "cluster.owner") in pairs and ("--run-dir", str(run_dir)) in pairs


def _is_locked(run_dir: Path) -> bool:
    """Return whether a process keeps the run folder. One that was killed holds the lock until its last thread ends."""
    deadline_s = time.monotonic() + _DEATH_TIMEOUT_S
    while True:
        try:
            with lock_run_dir(run_dir):
                return False
        except RunDirTaken:
            if time.monotonic() > deadline_s:
                return True
            time.sleep(_POLL_S)
        except OSError:  # there is no folder
            return False


def _remove_from_ray(name: str, state_file: StateFile, report: Report) -> bool:
    """End the actors of a cluster whose supervisor is gone or does not answer; returns whether there were any.

    Raises ClusterError if Ray does not answer. What runs on this host is killed all the same, and state.json stays: a
    controller that Ray starts again then ends the rest.
    """
    state = state_file.read()
    environment = outside.reaches_ray(state)
    if not environment:
        return False
    try:
        removed = outside.remove_actors(name, environment, report=report)
    except outside.RayDoesNotAnswer as error:
        if state is None:
            raise ClusterError(f"{error}; a cluster {name} may run there: repeat when it answers") from error
        here = [each for each in (state.supervisor, *_members(state)) if each.is_alive()]
        for each in here:
            each.signal(signal.SIGKILL)
        _alive_after(here, _DEATH_TIMEOUT_S)
        with contextlib.suppress(OSError):
            state_file.write(replace(state, phase=ClusterPhase.STOPPING))
        elsewhere = ", ".join(process.name for process in state.processes if process.identity is None)
        raise ClusterError(
            f"{error}. {len(here)} processes of this host were killed"
            f"{f'; {elsewhere} may still run on other hosts' if elsewhere else ''}."
            " Repeat `kvrelay down` when Ray answers, or run `ray stop` on every host"
        ) from error
    if removed:
        report(f"removed {', '.join(removed)} from Ray")
    return bool(removed)


def clean_up(state_file: StateFile, report: Report) -> bool:
    """Kill the processes that a dead supervisor left. Returns whether there were any. Raises ClusterError."""
    state = state_file.read()
    if state is None:
        return False
    if state.supervisor.is_alive():  # it has just started, or outlived SIGKILL
        raise ClusterError(
            f"cannot clean up: a supervisor ({state.supervisor.pid}) is alive; stop its cluster with `kvrelay down`"
        )
    # The kernel ends its children on Linux; this is for others.
    left = [each for each in _members(state) if each.is_alive()]
    for each in left:
        each.signal(signal.SIGKILL)
    stubborn = _alive_after(left, _DEATH_TIMEOUT_S)
    if stubborn:
        raise ClusterError(f"cannot clean up: processes {', '.join(str(each.pid) for each in stubborn)} do not die")
    if left:
        report(f"killed {len(left)} processes that a dead supervisor had left behind")
    state_file.remove()
    return bool(left)


def _members(state: ClusterState) -> list[ProcessIdentity]:
    own = [process.identity for process in state.processes if process.identity is not None]
    return [*own, *state.helpers]


def _alive_after(identities: Iterable[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait for processes to die; return those that are alive after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    left = [each for each in identities if each.is_alive()]
    # Polled: they are not our children, and a dead process keeps its pid until its parent reaps it.
    while left and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        left = [each for each in left if each.is_alive()]
    return left
