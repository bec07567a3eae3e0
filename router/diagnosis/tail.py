"""The slowest first tokens: which requests have them, and which part of their plans costs most."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from common.ids import RequestId
from router.diagnosis.changes import short_time
from router.observe.recent_requests import RecentRequest, most_awaited

Terms = Callable[[Iterable[RequestId]], Mapping[RequestId, Mapping[str, float]]]
"""Returns the parts of the cost of the latest plan of each of these requests, as far as they are known."""

_SHARE = 0.05
_MIN_REQUESTS = 20
_TIMES_MEDIAN = 3.0
_LINE = "the router's line"
_PARTS: tuple[tuple[str, Callable[[RecentRequest], float]], ...] = (
    (_LINE, lambda each: each.line_s),
    ("the worker's queue", lambda each: each.worker_queue_s),
    ("their prefill", lambda each: each.prefill_s),
    ("KV after their prefill", lambda each: each.transfer_exposed_s),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The slowest twentieth of some requests."""

    lost_s: float
    """Time by which they are slower than the median, in the mean of all requests."""
    slowest: RequestId
    text: str


def tail_of(requests: Sequence[RecentRequest], terms: Terms) -> Tail | None:
    """Return the tail where it is several times slower than the median; None without one, or for few requests."""
    if len(requests) < _MIN_REQUESTS:
        return None
    ordered = sorted(requests, key=lambda each: -each.ttft_s)
    slow, usual_s = ordered[: round(_SHARE * len(ordered))], median(each.ttft_s for each in ordered)
    if slow[-1].ttft_s < _TIMES_MEDIAN * usual_s:
        return None
    mean_s = fmean(each.ttft_s for each in slow)
    part, part_s = max(((name, fmean(map(read, slow))) for name, read in _PARTS), key=lambda each: each[1])
    text = (
        f"the slowest {len(slow)} of {len(ordered)} requests wait {short_time(mean_s)} for their first token, half of"
        f" all at most {short_time(usual_s)}: {short_time(part_s)} of it is {part}"
        f"{most_awaited(slow) if part is _LINE else ''};"
        f" {fmean(each.num_computed_tokens for each in slow):.0f} tokens are computed for each of them,"
        f" {fmean(each.num_computed_tokens for each in ordered):.0f} for all"
    )
    return Tail(
        lost_s=(mean_s - usual_s) * len(slow) / len(ordered),
        slowest=slow[0].request_id,
        text=text + _of_tenant(slow, ordered) + _largest_term(terms({each.request_id for each in slow}).values()),
    )


def _of_tenant(slow: Sequence[RecentRequest], all_requests: Sequence[RecentRequest]) -> str:
    """Return the tenant with most of the slow requests; empty where there is only one."""
    if len({each.tenant for each in all_requests}) == 1:
        return ""
    ((tenant, count),) = Counter(each.tenant for each in slow).most_common(1)
    share = sum(each.tenant == tenant for each in all_requests) / len(all_requests)
    return f"; {count / len(slow):.0%} of them are tenant {tenant}'s, as are {share:.0%} of all"


def _largest_term(plans: Iterable[Mapping[str, float]]) -> str:
    """Return the part of the cost that is most often the largest one; empty where no plan is known."""
    largest = Counter(max(terms, key=lambda name: terms[name]) for terms in plans if terms)
    if not largest:
        return ""
    ((name, count),) = largest.most_common(1)
    return f"; the policy's largest cost was {name} in {count} of {largest.total()} of their plans"
