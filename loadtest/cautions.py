"""What somebody who reads a summary should be told before believing it."""

from collections.abc import Iterator, Sequence

from loadtest.records import RequestRecord
from loadtest.summary import Summary

_FEW_REQUESTS = 30
_MANY_TOKENS_PER_PIECE = 1.05
_MIN_ARRIVAL_GROWTH = 1.2


def cautions(summary: Summary, requests: Sequence[RequestRecord]) -> tuple[str, ...]:
    """Return the warnings of a summary, gravest first; `requests` are those that it counts."""
    return (*summary.info.generator.warnings, *_of_load(summary), *_of_requests(summary, requests))


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


def _of_requests(summary: Summary, requests: Sequence[RequestRecord]) -> Iterator[str]:
    overall = summary.overall
    if overall.num_requests < _FEW_REQUESTS:
        yield f"only {overall.num_requests} requests were counted: intervals are rough"
    if overall.num_cancelled:
        yield (
            f"{overall.num_cancelled} requests were cancelled when the run was ended; they count as failures"
            " (--cool-down leaves the last ones out)"
        )
    num_short = sum(r.is_complete and r.num_output_tokens < r.num_wanted_tokens for r in requests)
    if num_short:
        yield f"{num_short} answers ended before the length that was asked for: less work than planned"
    if overall.tokens_per_piece is not None and overall.tokens_per_piece > _MANY_TOKENS_PER_PIECE:
        yield (
            f"a piece of an answer holds {overall.tokens_per_piece:.2f} tokens in the mean: ITL is the gap between"
            " pieces, so compare systems by TPOT"
        )
