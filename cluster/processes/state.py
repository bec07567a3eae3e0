"""state.json: the processes of a cluster, for other programs and for a supervisor that takes the cluster over.

The supervisor writes it, and `kvrelay down` in the place of one that is gone; each time atomically. Processes are
recorded by identity, not by pid, so that the file of a killed supervisor never makes a program signal an unrelated
process.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from cluster.processes.life import ProcessPhase
from cluster.processes.plan import POOLS, ProcessRole, ProcessSpec, with_sizes
from cluster.processes.run_dir import write_private
from common.config import ServingConfig
from common.process import ProcessIdentity

_FORMAT = 4


class ClusterPhase(StrEnum):
    """Life cycle of a cluster: STARTING → READY → STOPPING, or STARTING → FAILED. At the end the file is removed.

    A controller that takes over the processes of an earlier one begins with ADOPTING instead of STARTING.
    """

    STARTING = "starting"
    ADOPTING = "adopting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        """Whether the cluster is being stopped."""
        return self in (ClusterPhase.STOPPING, ClusterPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One supervised process."""

    name: str
    role: str
    phase: ProcessPhase
    identity: ProcessIdentity | None
    """None before it is ready, and for a process on another host."""
    address: str
    """host:port, empty before it is ready."""
    metrics_port: int
    num_restarts: int
    last_exit: str
    """How it died last; empty if it never did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The whole file."""

    name: str
    launcher: str
    phase: ClusterPhase
    supervisor: ProcessIdentity
    addresses: tuple[str, ...]
    """host:port of each router, as a client dials it."""
    http_addresses: tuple[str, ...]
    """host:port of their HTTP doors; empty without any."""
    processes: tuple[ProcessState, ...]
    tls: bool | str
    """How clients on this host connect to its doors, as `kvrelay.client.tls.Tls`."""
    helpers: tuple[ProcessIdentity, ...]
    """Every other process below the supervisor, such as Ray's daemons."""
    ray_environment: Mapping[str, str]
    """Environment that reaches the joined Ray cluster; empty without one."""
    trouble: str = ""
    """Why its controller does not supervise the processes yet, though they serve; empty if it does."""


_STATE = TypeAdapter(ClusterState)


class StateFile:
    """state.json of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "state.json"

    def read(self) -> ClusterState | None:
        """Return the state, or None without a file that this version can read."""
        try:
            entry = json.loads(self._path.read_text(encoding="utf-8"))
            return _STATE.validate_python(entry) if entry["format"] == _FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, state: ClusterState) -> None:
        """Replace the file. Raises OSError."""
        write_private(self._path, json.dumps({"format": _FORMAT, **asdict(state)}, indent=1) + "\n")

    def remove(self) -> None:
        """Delete the file if it exists."""
        self._path.unlink(missing_ok=True)


def wanted_processes(
    config: ServingConfig,
    plan_for: Callable[[ServingConfig], Sequence[ProcessSpec]],
    *,
    found: Collection[str],
    last: ClusterState | None,
) -> list[ProcessSpec]:
    """Return the processes that a new supervisor runs: those `found` by name, and those in the `last` state.

    Without a state, those configured take the place of the recorded ones. So changed sizes are kept, a worker that
    happened to be away is not forgotten, and unknown names are ignored. Raises PlanError.
    """
    recorded = {each.name for each in (plan_for(config) if last is None else last.processes)}
    names = recorded | set(found)
    numbers = {role: _numbers(names, role) for role in POOLS}
    specs = plan_for(with_sizes(config, {role: max(of_role, default=-1) + 1 for role, of_role in numbers.items()}))
    return [spec for spec in specs if spec.role is ProcessRole.ROUTER or spec.name in names]


def has_served(found: Collection[str], last: ClusterState | None) -> bool:
    """Return whether the processes found belong to a cluster that served before."""
    return bool(found) and (last is None or last.phase in (ClusterPhase.READY, ClusterPhase.ADOPTING))


def _numbers(names: Collection[str], role: ProcessRole) -> list[int]:
    parts = (name.rpartition("-") for name in names)
    return [int(number) for pool, _, number in parts if pool == role and number.isdecimal()]
