"""What somebody who reads a summary should be told before believing it."""

from collections.abc import Iterator

from measure.load.summary import KindSummary, Summary
from measure.pages.wording import count

_FEW_REQUESTS = 30
_MANY_TOKENS_PER_PIECE = 1.05
_MIN_ARRIVAL_GROWTH = 1.2


def cautions(summary: Summary) -> tuple[str, ...]:
    """Return the warnings of a summary, gravest first."""
    info = summary.info
    return (*info.generator.warnings, *_of_load(summary), *_of_requests(summary.overall), *info.notes)


def _of_load(summary: Summary) -> Iterator[str]:
    steady = summary.steadiness
    if not steady.is_steady and steady.e2e_growth is not None:
        yield (
            f"unstable: requests that wait or run grew from {steady.backlog_early:.0f} to {steady.backlog_late:.0f},"
            f" answers took {steady.e2e_growth.value:.1f} times as long at the end as at the beginning; the load is"
            " above capacity, and a longer run would show longer latencies"
        )
        if steady.arrival_growth >= _MIN_ARRIVAL_GROWTH:
            yield f"the load itself grew {steady.arrival_growth:.1f}-fold: capacity lies between its ends"
    window = summary.window
    if window.rates_end_s > window.end_s:
        yield (
            "requests arrived for a shorter time than answers take, so rates are until the last answer:"
            " a longer run would show higher ones"
        )


def _of_requests(overall: KindSummary) -> Iterator[str]:
    if overall.num_requests < _FEW_REQUESTS:
        yield f"only {count(overall.num_requests, 'request')} counted: intervals are rough"
    if overall.num_cancelled:
        yield "what the load test cancelled counts as not good; --cool-down SECONDS leaves out the last requests"
    if overall.tokens_per_piece is not None and overall.tokens_per_piece > _MANY_TOKENS_PER_PIECE:
        yield (
            f"a piece of an answer holds {overall.tokens_per_piece:.2f} tokens in the mean: ITL is the gap between"
            " pieces, so compare systems by TPOT"
        )
