"""Finds the stop sequence that ended an answer.

Workers report only that some stop did: the end-of-sequence token or a string. The text that they sent ends right before
a string, so the string is what follows that text in the decoded tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kvrelay.v1 import sampling_pb2

Decode = Callable[[Sequence[int]], str]
"""Returns the text of consecutive tokens."""

_NUM_COMPARED_CHARS = 16
_NUM_EXTRA_TOKENS = 24
"""Tokens decoded before the longest stop: for the text to compare, and a first character that may be incomplete."""


class StopFinder:
    """Remembers the end of an answer."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._decode = decode
        # A token spells a byte or more.
        most = max((len(stop.encode()) for stop in stops), default=0) + _NUM_EXTRA_TOKENS
        self._token_ids: deque[int] = deque(maxlen=most)
        self._text = ""

    def push(self, token: sampling_pb2.SampleToken) -> None:
        """Take the next token."""
        if self._stops:
            self._token_ids.append(token.token_id)
            self._text = (self._text + token.text)[-_NUM_COMPARED_CHARS:]

    def find(self) -> str | None:
        """Return the stop that ended the answer; None if none did, or if it is not certain."""
        if not self._stops:
            return None
        return matched_stop(self._stops, text=self._text, decoded=self._decode(list(self._token_ids)))


def matched_stop(stops: Sequence[str], *, text: str, decoded: str) -> str | None:
    """Return the stop that follows `text` in `decoded`, the text of the last tokens with what was not sent.

    If several match, it is the one that was complete first, and the longest of those: the one that a worker stops at.
    """
    found: list[tuple[int, int, str]] = []
    for stop in stops:
        begin = decoded.rfind(stop)
        before = decoded[max(0, begin - _NUM_COMPARED_CHARS) : max(0, begin)]
        if begin >= 0 and text.endswith(before) and (before or not text):
            found.append((begin + len(stop), -len(stop), stop))
    return min(found)[2] if found else None
