"""How a worker has done lately, from the reports of all routers. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.v1 import router_admin_pb2

MIN_FAILED = 4.0
"""Failed attempts that are needed for a suspicion; each counts half after a minute (`router/fleet/lives.py`)."""
MIN_SHARE = 0.2
"""Share of its attempts that a suspected worker has failed."""
FACTOR = 3.0
"""Multiple of its peers' share at which a worker stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHealth:
    """How one life of a worker has done lately, as all routers saw it."""

    num_attempts: float = 0.0
    num_failed: float = 0.0
    slowness: float | None = None
    """Multiple of the step time of its pool's other workers; None: it has measured too few steps."""
    is_slow: bool = False


def merge(reports: Iterable[Sequence[router_admin_pb2.WorkerHealth]]) -> dict[str, WorkerHealth]:
    """Return the health of each worker: attempts of all routers added up, its speed as most of them see it.

    When routers know different lives of a worker, the life that most of them know counts.
    """
    lives: dict[str, dict[int, list[router_admin_pb2.WorkerHealth]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        for each in report:
            lives[each.worker_id][each.epoch].append(each)
    return {name: _add_up(max(by_epoch.values(), key=len)) for name, by_epoch in lives.items()}


def _add_up(seen: Sequence[router_admin_pb2.WorkerHealth]) -> WorkerHealth:
    measured = [each for each in seen if each.slowness > 0]
    return WorkerHealth(
        num_attempts=sum(each.num_attempts for each in seen),
        num_failed=sum(each.num_failed for each in seen),
        slowness=max((each.slowness for each in measured), default=None),
        is_slow=2 * sum(each.is_slow for each in measured) > len(measured),
    )


def find_failing(pool: Mapping[str, WorkerHealth]) -> list[str]:
    """Return the workers of a pool whose share of failed attempts stands out from that of the others."""
    attempts = sum(each.num_attempts for each in pool.values())
    failed = sum(each.num_failed for each in pool.values())
    failing = []
    for name, one in pool.items():
        others_failed, others_attempts = failed - one.num_failed, attempts - one.num_attempts
        usual = others_failed / others_attempts if others_attempts > 0 else 0.0
        share = one.num_failed / one.num_attempts if one.num_attempts > 0 else 0.0
        if one.num_failed >= MIN_FAILED and share >= max(MIN_SHARE, FACTOR * usual):
            failing.append(name)
    return failing
