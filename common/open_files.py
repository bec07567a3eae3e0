"""How many clients a process can hold: every connection is an open file, and a process may have so many."""

import logging
import resource

logger = logging.getLogger(__name__)

_MIN_RESERVED = 64


def claim_open_files() -> int:
    """Raise the process's limit of open files as far as it may go; returns the limit. Logs a change."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("limit of open files raised", extra={"before": soft, "after": hard})
    return hard


_NUM_LISTENERS = 3
"""A router has two doors and its administration; a worker has control, KV plane and direct door."""


def connections_per_listener(open_files: int) -> int:
    """Return how many connections each of a process's listeners may hold, of that many open files.

    A quarter, and at least 64, is for what the process opens itself: calls to workers, files, pipes, metrics.
    """
    return max(1, (open_files - max(_MIN_RESERVED, open_files // 4)) // _NUM_LISTENERS)
