"""The slowest first tokens: which requests have them, and which part of their plans costs most."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

from router.diagnosis.changes import SuggestedChange, short_time
from router.diagnosis.finding import Cause, DiagnosisFinding, DiagnosisInput
from router.observe.recent_requests import RecentRequest, most_awaited

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


def tail(view: DiagnosisInput) -> list[DiagnosisFinding]:
    """Return the time by which the slowest twentieth of the requests exceed the median, where that is several times."""
    if len(view.requests) < _MIN_REQUESTS:
        return []
    ordered = sorted(view.requests, key=lambda each: -each.ttft_s)
    slow, usual_s = ordered[: round(_SHARE * len(ordered))], median(each.ttft_s for each in ordered)
    if slow[-1].ttft_s < _TIMES_MEDIAN * usual_s:
        return []
    mean_s = fmean(each.ttft_s for each in slow)
    part, part_s = max(((name, fmean(map(read, slow))) for name, read in _PARTS), key=lambda each: each[1])
    text = (
        f"the slowest {len(slow)} of {len(ordered)} requests wait {short_time(mean_s)} for their first token, half of"
        f" all at most {short_time(usual_s)}: {short_time(part_s)} of it is {part}"
        f"{most_awaited(slow) if part is _LINE else ''};"
        f" {fmean(each.num_computed_tokens for each in slow):.0f} tokens are computed for each of them,"
        f" {fmean(each.num_computed_tokens for each in ordered):.0f} for all"
    )
    slowest = slow[0].request_id
    more = f"`kvrelay why --request {slowest}` has the parts of the slowest one, `kvrelay explain` its plan"
    terms = view.terms({each.request_id for each in slow}).values()
    return [
        DiagnosisFinding(
            cause=Cause.TAIL,
            pool=view.reader.name,
            lost_s=(mean_s - usual_s) * len(slow) / len(ordered),
            text=text + _of_tenant(slow, ordered) + _largest_term(terms),
            options=(SuggestedChange(text=more),),
        )
    ]


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
