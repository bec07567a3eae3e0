"""state.json: what a cluster consists of right now, for whoever looks at its run folder.

Written by the supervisor alone, replaced atomically. Processes are named by identity, not by pid, so that a file left
behind by a killed supervisor never makes anybody signal a stranger.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.process import ProcessIdentity

_FORMAT = 4


class ClusterPhase(StrEnum):
    """Life cycle of a cluster: STARTING → READY → STOPPING, or STARTING → FAILED. The file goes away at the end."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class ProcessPhase(StrEnum):
    """Life cycle of a supervised process: STARTING → READY → WAITING → STARTING …, any → STOPPED."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """Dead; the next start is being held back."""
    STOPPED = "stopped"


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
    """How it died last; empty when it never did."""


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
    """The same of their HTTP doors; empty without any."""
    processes: tuple[ProcessState, ...]
    tls: bool | str
    """How clients on this host connect to its doors, as `kvrelay.client.tls.Tls`."""
    helpers: tuple[ProcessIdentity, ...]
    """Every other process below the supervisor, such as Ray's daemons."""
    ray_environment: Mapping[str, str]
    """What reaches the Ray cluster in which all this runs, supervisor included; empty when there is none."""


class StateFile:
    """state.json of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "state.json"

    def read(self) -> ClusterState | None:
        """Return the state, or None when there is none that this version can read."""
        try:
            return _decode(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, state: ClusterState) -> None:
        """Replace the file. Raises OSError."""
        entry = {"format": _FORMAT, **asdict(state)}
        scratch = self._path.with_suffix(".tmp")
        scratch.unlink(missing_ok=True)
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self._path)  # noqa: PTH105 - the atomic one, by its usual name

    def remove(self) -> None:
        """Delete the file if it is there."""
        self._path.unlink(missing_ok=True)


def _decode(entry: Mapping[str, Any]) -> ClusterState:
    if entry["format"] != _FORMAT:
        raise ValueError(f"format {entry['format']}, not {_FORMAT}")
    return ClusterState(
        name=entry["name"],
        launcher=entry["launcher"],
        phase=ClusterPhase(entry["phase"]),
        supervisor=ProcessIdentity(**entry["supervisor"]),
        addresses=tuple(entry["addresses"]),
        http_addresses=tuple(entry["http_addresses"]),
        processes=tuple(_decode_process(item) for item in entry["processes"]),
        tls=entry["tls"],
        helpers=tuple(ProcessIdentity(**item) for item in entry["helpers"]),
        ray_environment=dict(entry["ray_environment"]),
    )


def _decode_process(entry: Mapping[str, Any]) -> ProcessState:
    identity = entry["identity"]
    known = {**entry, "phase": ProcessPhase(entry["phase"])}
    return ProcessState(**{**known, "identity": ProcessIdentity(**identity) if identity is not None else None})
