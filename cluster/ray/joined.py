"""A cluster in a Ray that is there already, as seen from outside it: by processes that hold no connection. No Ray.

Ray runs the controller anew when it dies, so a dead supervisor's pid says nothing: only Ray knows what there is.
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
    """Return what reaches the Ray cluster that a state, or else this environment, names; empty for none."""
    own = ray_settings.of_joined_cluster("ray")
    if state is None:
        return own
    return {**state.ray_environment, **own} if state.ray_environment else {}


def find_actors(cluster: str, environment: Mapping[str, str]) -> list[str]:
    """Return the names of a cluster's actors, its controller among them; none when that Ray is gone."""
    return _ask("find", cluster, environment)


def remove_actors(cluster: str, environment: Mapping[str, str]) -> list[str]:
    """End every actor of a cluster at once and return their names."""
    return _ask("remove", cluster, environment)


def wait_for_end(run_dir: Path) -> None:
    """Return when the cluster of a folder has been stopped. A controller that is away comes back: Ray sees to it."""
    state_file = StateFile(run_dir)
    while state_file.read() is not None:  # its last writer removes it
        time.sleep(_POLL_S)


def _ask(verb: Literal["find", "remove"], cluster: str, environment: Mapping[str, str]) -> list[str]:
    """Ask in a process of its own: this one need not import Ray, nor be bound to one."""
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
