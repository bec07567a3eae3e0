"""Ray's environment variables. Ray reads them when it is imported, so this module does not import it."""

import os
import secrets
from collections.abc import Mapping

_LEAN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Interval at which a caller checks whether a dead actor is back; 1000 by default.
    "RAY_core_worker_internal_heartbeat_ms": "50",
}
_LEAN_PRIVATE = {
    # Idle workers, which we never use, cost a second of start-up.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


_ADDRESS = "RAY_ADDRESS"
_OF_A_DRIVER = (_ADDRESS, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


def of_joined_cluster(launcher: str) -> Mapping[str, str]:
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
