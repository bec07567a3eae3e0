"""Ray's environment variables. Ray reads them when it is imported, so they are set before; hence no Ray in here."""

import os
import secrets
from collections.abc import Mapping

_LEAN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # How often a caller looks whether a dead actor is back; 1000 by default.
    "RAY_core_worker_internal_heartbeat_ms": "50",
}
_LEAN_PRIVATE = {
    # Idle workers that nobody will use cost a second of start-up.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


_ADDRESS = "RAY_ADDRESS"
_OF_A_DRIVER = (_ADDRESS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


def of_joined_cluster(launcher: str) -> Mapping[str, str]:
    """Return what a process must have in its environment to reach the Ray cluster that this one joins; {} for none."""
    if launcher != "ray" or not os.environ.get(_ADDRESS):
        return {}
    return {key: os.environ[key] for key in _OF_A_DRIVER if key in os.environ}


def prepare_to_join() -> None:
    """Set what a driver of somebody else's Ray cluster wants, where the user has not. Authentication is the user's."""
    for key, value in _LEAN.items():
        os.environ.setdefault(key, value)


def prepare_to_start() -> None:
    """Set what a private Ray on this machine wants, and a random token that only its own processes inherit.

    Ray listens on all interfaces, and whoever may talk to it may run code.
    """
    prepare_to_join()
    for key, value in _LEAN_PRIVATE.items():
        os.environ.setdefault(key, value)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
