"""The limit of open files of a process, and the connections that it allows."""

import logging
import resource

logger = logging.getLogger(__name__)

_MIN_RESERVED = 64


def claim_open_files() -> int:
    """Raise the process's limit of open files to its maximum and return it. Logs a change."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("limit of open files raised", extra={"before": soft, "after": hard})
    return hard


_NUM_LISTENERS = 3
"""Listeners of a process: a router has two doors and administration; a worker has control, KV plane and direct door."""


def connections_per_listener(open_files: int) -> int:
    """Return how many connections each listener of a process may hold within `open_files`.

    A quarter, and at least 64, is reserved for the process itself: calls to workers, files, pipes, metrics.
    """
    return max(1, (open_files - max(_MIN_RESERVED, open_files // 4)) // _NUM_LISTENERS)
