"""Recent demand on this router: counts by the second, and a sample of the finished requests.

The meter does nothing per token and little per request. Each finished request draws a random number, and each second
keeps the requests with the smallest numbers; the smallest of several seconds are a uniform sample of all requests that
finished in them.
"""

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.demand import Demand, RequestShape
from common.slo import Slo

REMEMBERED_S = 120
NUM_SAMPLED = 128
"""Size of the sample of a window, and most requests kept of one second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that was answered completely. A Served (common/slo.py)."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_read_tokens: int
    num_evicted_tokens: int
    num_output_tokens: int
    """Tokens of one sample."""
    ttft_s: float | None
    tpot_s: float | None
    is_complete: bool = True


@dataclass(slots=True)
class _Second:
    number: int
    """Seconds since the clock's zero."""
    num_arrived: int = 0
    num_refused: int = 0
    num_finished: int = 0
    num_good: int = 0
    sample: list[tuple[float, int, Answered]] = field(default_factory=list)
    """A heap of (-random number, its position, request): the largest random number first."""


class DemandMeter:
    """Counts arrivals, refusals and answers. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.slo: Slo | None = None
        """Objectives of good answers; None: all are good."""
        self._random = random.Random(0)
        self._seconds: deque[_Second] = deque()
        self._began_s = clock.monotonic()

    def judge_by(self, slo: Slo) -> None:
        """Count answers within these objectives as good; without objectives, all are good."""
        self.slo = slo

    def note_arrival(self) -> None:
        """Count a request that arrives."""
        self._now().num_arrived += 1

    def note_refusal(self) -> None:
        """Count an arrival that is refused because room or time is missing."""
        self._now().num_refused += 1

    def note_answer(self, answered: Answered) -> None:
        """Count a request that was answered completely."""
        second = self._now()
        second.num_finished += 1
        second.num_good += self.slo is None or self.slo.is_good(answered)
        entry = (-self._random.random(), second.num_finished, answered)
        if len(second.sample) < NUM_SAMPLED:
            heapq.heappush(second.sample, entry)
        else:
            heapq.heappushpop(second.sample, entry)

    def demand(self, window_s: float, *, num_queued: int, num_queued_tokens: int) -> Demand:
        """Return the demand of the last `window_s` full seconds, or of as many as are known."""
        self._now()
        now = self._seconds[-1].number
        num_known = min(now - math.ceil(self._began_s), REMEMBERED_S)
        num_seconds = max(0, min(round(window_s), num_known))
        window = [second for second in self._seconds if now - num_seconds <= second.number < now]
        kept = heapq.nlargest(NUM_SAMPLED, (entry for second in window for entry in second.sample))
        answers = [answered for _random, _position, answered in kept]
        return Demand(
            window_s=float(num_seconds),
            num_arrived=sum(second.num_arrived for second in window),
            num_refused=sum(second.num_refused for second in window),
            num_finished=sum(second.num_finished for second in window),
            num_good=sum(second.num_good for second in window),
            shapes=tuple(
                RequestShape(
                    num_prompt_tokens=answered.num_prompt_tokens,
                    num_computed_tokens=answered.num_computed_tokens,
                    num_output_tokens=answered.num_output_tokens,
                    num_read_tokens=answered.num_read_tokens,
                    num_evicted_tokens=answered.num_evicted_tokens,
                )
                for answered in answers
            ),
            num_queued=num_queued,
            num_queued_tokens=num_queued_tokens,
            ttft_p90_s=_p90([answered.ttft_s for answered in answers if answered.ttft_s is not None]),
            tpot_p90_s=_p90([answered.tpot_s for answered in answers if answered.tpot_s is not None]),
            burstiness=self._burstiness(num_known, now),
        )

    def _now(self) -> _Second:
        """Return the current second; drop those that are too old."""
        number = math.floor(self._clock.monotonic())
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_Second(number))
            while self._seconds[0].number < number - REMEMBERED_S:
                self._seconds.popleft()
        return self._seconds[-1]

    def _burstiness(self, num_known: int, now: int) -> float:
        """Return variance over mean of the arrivals per second; 1.0 while it is unknown."""
        counts = [second.num_arrived for second in self._seconds if now - num_known <= second.number < now]
        if num_known < 2 or not sum(counts):
            return 1.0
        counts += [0] * (num_known - len(counts))  # seconds without any event are not in the list
        return statistics.variance(counts) / statistics.fmean(counts)


def _p90(values: Sequence[float]) -> float | None:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else None
