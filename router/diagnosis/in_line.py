"""The waits in line by tenant, and the line as it is now, in words."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from router.diagnosis.changes import short_time
from router.observe.recent_requests import RecentRequest, longest_awaited, most_awaited
from router.placement.waits import WaitingRequest

_NUM_TENANTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWaits:
    """A tenant's requests in line, now and in a window."""

    tenant: str
    num_waiting: int
    """Requests that wait now."""
    longest_wait_s: float
    """Longest wait of these so far."""
    num_answered: int
    mean_wait_s: float
    """Wait in line of the answered ones, in the mean."""
    mostly_for: str
    """The cause of most of their waiting, all requests together."""


def describe_line(waiting: Sequence[WaitingRequest]) -> str:
    """Return how many requests wait now, how long, and for what; empty when none waits."""
    if not waiting:
        return ""
    count = "1 request waits" if len(waiting) == 1 else f"{len(waiting)} requests wait"
    longest_s = max(each.waits.total_s for each in waiting)
    return f"{count} in line for up to {short_time(longest_s)}{most_awaited(waiting)}"


def waits_by_tenant(answered: Sequence[RecentRequest], waiting: Sequence[WaitingRequest]) -> list[TenantWaits]:
    """Return the tenants whose requests wait or have waited, those with most that wait now first."""
    by_tenant: defaultdict[str, tuple[list[RecentRequest], list[WaitingRequest]]] = defaultdict(lambda: ([], []))
    for answer in answered:
        by_tenant[answer.tenant][0].append(answer)
    for request in waiting:
        by_tenant[request.tenant][1].append(request)
    found = [
        TenantWaits(
            tenant=tenant,
            num_waiting=len(now),
            longest_wait_s=max((each.waits.total_s for each in now), default=0.0),
            num_answered=len(before),
            mean_wait_s=fmean(each.waits.total_s for each in before) if before else 0.0,
            mostly_for=awaited,
        )
        for tenant, (before, now) in by_tenant.items()
        if (awaited := longest_awaited([*before, *now]))
    ]
    return sorted(found, key=lambda each: (-each.num_waiting, -each.mean_wait_s))[:_NUM_TENANTS]
