"""Fair queues of numbers: request n arrives at second n."""

import math
from collections.abc import Container

from router.line.fair_queue import FairQueue
from router.line.tenant_queue import Place, rank

TENANTS = {"a": 1.0, "b": 1.0, "heavy": 3.0}


def make_queue(*, late_share: float = 0.0, **weights: float) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue(late_share=late_share)
    for name, weight in weights.items():
        queue.add_tenant(name, weight=weight)
    return queue


def push(
    queue: FairQueue[int],
    number: int,
    *,
    tenant: str = "a",
    priority: int = 0,
    work_s: float = 0.0,
    due_s: float = math.inf,
    deadline_s: float = math.inf,
) -> Place[int]:
    """Add a request that arrives at second `number`, and is late after `due_s`."""
    key = rank(priority=priority, work_s=work_s, due_s=number if due_s == math.inf else due_s, number=number)
    return queue.push(number, tenant=tenant, rank=key, work_s=work_s, due_s=due_s, deadline_s=deadline_s)


def serve(queue: FairQueue[int], *, cost: float = 0.0, skipping: Container[str] = (), now_s: float = 0.0) -> Place[int]:
    """Take out the next place, which must exist, and charge its tenant."""
    place = queue.pop(now_s=now_s, skipping=skipping)
    assert place is not None
    queue.charge(place.tenant, cost)
    return place


def drain(queue: FairQueue[int], *, now_s: float = 0.0) -> list[int]:
    places = iter(lambda: queue.pop(now_s=now_s), None)
    return [place.item for place in places]
