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
        self._gaps: Counter[int] = Counter()

    def times(self, request_id: RequestId) -> TokenTimes | None:
        """Return what is known of a request."""
        return self._times.get(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has ended."""
        self._times.pop(request_id, None)

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
            self.count_gaps(gap_s, 1)

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

    def count_rising_gaps(self, first_s: float, last_s: float, count: int) -> None:
        """Count gaps that rise evenly from one length to another."""
        num_parts = 1 if last_s <= first_s else math.ceil(math.log(last_s / first_s) / _LOG_BIN)
        for part in range(num_parts):
            share = count * (part + 1) // num_parts - count * part // num_parts
            self.count_gaps(first_s + (last_s - first_s) * (part + 0.5) / num_parts, share)

    def count_gaps(self, gap_s: float, count: int) -> None:
        """Count gaps of one length."""
        if gap_s > 0:
            self._gaps[math.ceil(math.log(gap_s) / _LOG_BIN)] += count

    def gaps(self) -> list[tuple[float, int]]:
        """Return (upper bound of a bin in seconds, count), ascending; bins are 2 % wide."""
        return [(_BIN**number, self._gaps[number]) for number in sorted(self._gaps)]
