"""Throughput and latency of the last fifteen minutes, for the live page."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock
from router.observe.in_flight import InFlight
from router.observe.recent_requests import RecentRequests

INTERVAL_S = 5.0
NUM_POINTS = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """Throughput and latency of one interval. Percentiles cover the answers that ended in it; None when none did."""

    ended_s: float
    """On the router's clock."""
    output_tokens_per_s: float
    requests_per_s: float
    """Complete answers per second."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None


class History:
    """The latest `NUM_POINTS` points. Event loop only."""

    def __init__(self, *, in_flight: InFlight, recent: RecentRequests, clock: Clock) -> None:
        self._in_flight = in_flight
        self._recent = recent
        self._clock = clock
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)
        self._ended_s = clock.monotonic()
        self._num_output_tokens = 0

    @property
    def points(self) -> Sequence[HistoryPoint]:
        """The points, oldest first."""
        return self._points

    async def watch(self) -> None:
        """Add a point each `INTERVAL_S`, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.add_point()

    def add_point(self) -> None:
        """End the interval that began with the latest point. Time must have passed since."""
        now_s, num_output_tokens = self._clock.monotonic(), self._in_flight.num_output_tokens
        seconds = now_s - self._ended_s
        answers = [each for each in self._recent.over(seconds) if each.num_output_tokens]
        ttfts = sorted(each.ttft_s for each in answers)
        tpots = sorted(each.tpot_s for each in answers if each.tpot_s is not None)
        self._points.append(
            HistoryPoint(
                ended_s=now_s,
                output_tokens_per_s=(num_output_tokens - self._num_output_tokens) / seconds,
                requests_per_s=len(answers) / seconds,
                ttft_p50_s=_percentile(ttfts, 0.5),
                ttft_p95_s=_percentile(ttfts, 0.95),
                tpot_p50_s=_percentile(tpots, 0.5),
                tpot_p95_s=_percentile(tpots, 0.95),
            )
        )
        self._ended_s, self._num_output_tokens = now_s, num_output_tokens


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value with this share of the values below it; None without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
