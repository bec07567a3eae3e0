"""Fair queues of numbers: request n arrives at second n."""

import math
from collections.abc import Container
from dataclasses import dataclass

from router.line.fair_queue import FairQueue
from router.line.tenant_queue import Place, rank

TENANTS = {"a": 1.0, "b": 1.0, "heavy": 3.0}


@dataclass(slots=True, eq=False, kw_only=True)
class Item(Place):
    """A number in line."""

    item: int

    @property
    def tenant(self) -> str:
        """Name of the queue that it was put in."""
        return self.queue.name


def make_queue(*, late_share: float = 0.0, **weights: float) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(late_share=late_share)
    for name, weight in weights.items():
        queue.add_tenant(name, weight=weight)
    return queue


def push(
    queue: FairQueue[Item],
    number: int,
    *,
    tenant: str = "a",
    priority: int = 0,
    work_s: float = 0.0,
    due_s: float = math.inf,
    deadline_s: float = math.inf,
) -> Item:
    """Add a request that arrives at second `number`, and is late after `due_s`."""
    key = rank(priority=priority, size_s=work_s, due_s=number if due_s == math.inf else due_s, number=number)
    place = Item(item=number, rank=key, work_s=work_s, due_s=due_s, deadline_s=deadline_s)
    queue.push(place, tenant=tenant)
    return place


def push_first(queue: FairQueue[Item], item: int, *, number: int | None = None, work_s: float = 0.0) -> Item:
    """Add a request before all newcomers, in the order of `number`: of `item`, if none is given."""
    place = Item(item=item, rank=(item if number is None else number,), work_s=work_s)
    queue.push_first(place)
    return place


def serve(queue: FairQueue[Item], *, cost: float = 0.0, skipping: Container[str] = (), now_s: float = 0.0) -> Item:
    """Take out the next place, which must exist, and charge its tenant."""
    place = queue.pop(now_s=now_s, skipping=skipping)
    assert place is not None
    queue.charge(place.tenant, cost)
    return place


def drain(queue: FairQueue[Item], *, now_s: float = 0.0) -> list[int]:
    places = iter(lambda: queue.pop(now_s=now_s), None)
    return [place.item for place in places]
