"""A cluster in a joined Ray, for processes without a connection to it. Does not import Ray.

Ray restarts a controller that dies, so a dead supervisor's pid proves nothing: only Ray knows the actors.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cluster.processes.state import ClusterState, StateFile
from cluster.ray import settings as ray_settings

_TIMEOUT_S = 60.0
_POLL_S = 0.5


def reaches_ray(state: ClusterState | None) -> Mapping[str, str]:
    """Return the environment that reaches the Ray cluster of a state, or else of this process; empty for none."""
    own = ray_settings.of_joined_cluster("ray")
    if state is None:
        return own
    return {**state.ray_environment, **own} if state.ray_environment else {}


def find_actors(cluster: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names of a cluster's actors, including its controller; none if that Ray is gone."""
    return _ask("find", cluster, environment)


def remove_actors(cluster: str, environment: Mapping[str, str]) -> list[str]:
    """End every actor of a cluster at once and return their names."""
    return _ask("remove", cluster, environment)


def wait_for_end(run_dir: Path) -> None:
    """Return when the cluster of a folder has been stopped. Ray restarts a controller that has only died."""
    state_file = StateFile(run_dir)
    while state_file.read() is not None:  # the supervisor removes it at the end
        time.sleep(_POLL_S)


def _ask(verb: Literal["find", "remove"], cluster: str, environment: Mapping[str, str]) -> list[str]:
    """Ask in another process, so that this one need not import Ray or connect to it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cluster.ray.bootstrap", verb, cluster],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        return []
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names
