"""Ray from outside: its environment variables, and a cluster's actors. Does not import Ray.

Ray reads its variables when it is imported. It restarts a controller that dies, so a dead supervisor's pid proves
nothing: only Ray knows the actors. A Ray that does not answer proves nothing either: its head may come back and know
them.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cluster.processes.starter import Report
from cluster.processes.state import ClusterState, StateFile

_POLL_S = 0.5
_ATTEMPT_S = 25.0
_NUM_ATTEMPTS = 3
_PAUSE_S = 2.0
_LEAN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Before 2.60 an actor that reserves no GPU saw none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Interval at which a caller checks whether a dead actor is back; 1000 by default.
    "RAY_core_worker_internal_heartbeat_ms": "50",
}
_LEAN_PRIVATE = {
    # Idle workers, which we never use, cost a second of start-up.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # 15 by default: any other program of this host would go before the services.
    "RAY_worker_niceness": "0",
}
_ADDRESS = "RAY_ADDRESS"
_OF_A_DRIVER = (_ADDRESS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


class RayDoesNotAnswer(Exception):
    """Ray did not answer a question, or did not carry out a request; the message gives the reason."""


def _ignore(text: str) -> None:
    """Drop a report."""


def joined_environment(launcher: str) -> Mapping[str, str]:
    """Return the environment that reaches the Ray cluster that this process joins; empty for none."""
    if launcher != "ray" or not os.environ.get(_ADDRESS):
        return {}
    return {key: os.environ[key] for key in _OF_A_DRIVER if key in os.environ}


def prepare_to_join() -> None:
    """Set defaults for a driver of an existing Ray cluster. Authentication is left to the user."""
    for key, value in _LEAN.items():
        os.environ.setdefault(key, value)


def prepare_to_start() -> None:
    """Set the variables of a private Ray on this host, with a random token that only its own processes inherit.

    The token is essential: Ray listens on all interfaces, and any program that can connect can run code.
    """
    prepare_to_join()
    for key, value in _LEAN_PRIVATE.items():
        os.environ.setdefault(key, value)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})


def reaches_ray(state: ClusterState | None) -> Mapping[str, str]:
    """Return the environment that reaches the Ray cluster of a state, or else of this process; empty for none."""
    own = joined_environment("ray")
    if state is None:
        return own
    return {**state.ray_environment, **own} if state.ray_environment else {}


def find_actors(cluster: str, environment: Mapping[str, str], *, report: Report = _ignore) -> list[str]:
    """Return the names of a cluster's actors, including its controller. Raises RayDoesNotAnswer."""
    return _ask("find", cluster, environment, report)


def remove_actors(cluster: str, environment: Mapping[str, str], *, report: Report = _ignore) -> list[str]:
    """End every actor of a cluster at once and return their names when they are gone. Raises RayDoesNotAnswer."""
    return _ask("remove", cluster, environment, report)


def wait_for_end(run_dir: Path) -> None:
    """Return when the cluster of a folder has been stopped. Ray restarts a controller that has only died."""
    state_file = StateFile(run_dir)
    while state_file.read() is not None:  # the supervisor removes it at the end
        time.sleep(_POLL_S)


def _ask(verb: Literal["find", "remove"], cluster: str, environment: Mapping[str, str], report: Report) -> list[str]:
    """Ask in another process, so that this one need not import Ray or connect to it; again if there is no answer."""
    for left in reversed(range(_NUM_ATTEMPTS)):
        try:
            return _ask_once(verb, cluster, environment)
        except RayDoesNotAnswer as error:
            if not left:
                raise
            report(f"{error}; asking again in {_PAUSE_S:g} s")
            time.sleep(_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def _ask_once(verb: str, cluster: str, environment: Mapping[str, str]) -> list[str]:
    where = f"Ray at {environment[_ADDRESS]}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cluster.ray.bootstrap", verb, cluster],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ATTEMPT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RayDoesNotAnswer(f"{where} does not answer within {_ATTEMPT_S:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RayDoesNotAnswer(f"{where} failed: {lines[-1]}")
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names
