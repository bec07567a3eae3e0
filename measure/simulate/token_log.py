"""When each token was generated, kept so that it costs little and loses nothing that is reported."""

import math
from collections import Counter
from dataclasses import dataclass

from common.ids import RequestId

_BIN = 1.02
_LOG_BIN = math.log(_BIN)


@dataclass(slots=True)
class TokenTimes:
    """Of one request."""

    first_s: float
    last_s: float
    count: int
    """Tokens, counted by their index: one that is generated again after a failure does not count."""
    gap_max_s: float = 0.0


class TokenLog:
    """Of all requests of a run, by the engines that generate the tokens."""

    def __init__(self) -> None:
        self._times: dict[RequestId, TokenTimes] = {}
        self._kinds: dict[RequestId, str] = {}
        self._gaps: dict[str, Counter[int]] = {}

    def begin(self, request_id: RequestId, kind: str) -> None:
        """A request of some kind comes; its gaps are counted with its kind's."""
        self._kinds[request_id] = kind

    def kind(self, request_id: RequestId) -> str:
        """Return a request's kind; "" of one that nobody has announced."""
        return self._kinds.get(request_id, "")

    def times(self, request_id: RequestId) -> TokenTimes | None:
        """Return what is known of a request."""
        return self._times.get(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has ended."""
        self._times.pop(request_id, None)
        self._kinds.pop(request_id, None)

    def note(self, request_id: RequestId, token_index: int, now_s: float) -> None:
        """A token came."""
        times = self._times.get(request_id)
        if times is None:
            self._times[request_id] = TokenTimes(now_s, now_s, token_index + 1)
        elif token_index >= times.count:
            gap_s = now_s - times.last_s
            times.last_s = now_s
            times.count = token_index + 1
            times.gap_max_s = max(times.gap_max_s, gap_s)
            self.count_gaps(self.kind(request_id), gap_s, 1)

    def note_run(self, request_id: RequestId, end_index: int, last_s: float, gap_max_s: float) -> None:
        """Tokens up to `end_index` came, the last one at `last_s`, their gaps at most `gap_max_s`.

        The gaps themselves are counted apart.
        """
        times = self._times[request_id]
        if end_index > times.count:
            times.last_s = last_s
            times.count = end_index
            times.gap_max_s = max(times.gap_max_s, gap_max_s)

    def last_s(self, request_id: RequestId, *, default_s: float) -> float:
        """Return when a request's last token came; one whose tokens nobody has seen begins with `default_s`."""
        times = self._times.setdefault(request_id, TokenTimes(default_s, default_s, 0))
        return times.last_s

    def count_rising_gaps(self, kind: str, first_s: float, last_s: float, count: int) -> None:
        """Count gaps of a kind of requests that rise evenly from one length to another."""
        num_parts = 1 if last_s <= first_s else math.ceil(math.log(last_s / first_s) / _LOG_BIN)
        for part in range(num_parts):
            share = count * (part + 1) // num_parts - count * part // num_parts
            self.count_gaps(kind, first_s + (last_s - first_s) * (part + 0.5) / num_parts, share)

    def count_gaps(self, kind: str, gap_s: float, count: int) -> None:
        """Count gaps of one length, of a kind of requests."""
        if gap_s > 0:
            self._gaps.setdefault(kind, Counter())[math.ceil(math.log(gap_s) / _LOG_BIN)] += count

    def gaps(self) -> list[tuple[float, int]]:
        """Return (upper bound of a bin in seconds, count) of all requests, ascending; bins are 2 % wide."""
        total: Counter[int] = Counter()
        for counts in self._gaps.values():
            total.update(counts)
        return _bounded(total)

    def gaps_by_kind(self) -> dict[str, list[tuple[float, int]]]:
        """Return the same of each kind of requests."""
        return {kind: _bounded(counts) for kind, counts in sorted(self._gaps.items())}


def _bounded(counts: Counter[int]) -> list[tuple[float, int]]:
    return [(_BIN**number, counts[number]) for number in sorted(counts)]
