"""Drafts from the text itself: what followed the last tokens when they stood there before, in prompt or answer.

Answers that edit, translate or quote repeat long pieces of their prompts (Saxena, Prompt Lookup Decoding, 2023). Places
are found as LZ77 finds them: each pair of tokens leads to the latest place behind it, and each place to the one before;
of the latest few, the one with the longest common text before it is the draft's source. A token costs O(1): one entry,
and a search of bounded length.

Where an answer leaves its source, it often comes back: a word was replaced, left out or put in between. Until two
tokens match again, the draft continues from the place near the source that has the answer's last token before it, or
else behind the token that was replaced.

The longer the common text, the likelier the draft. How likely is counted for every token of an answer, whether it was
drafted or not, since the prediction was there in any case.
"""

from array import array
from bisect import bisect_right
from itertools import accumulate
from operator import mul

from common.tokens import TokenArray, as_tokens
from engine.sequence import Sequence
from engine.speculation.drafter import Draft

MIN_MATCH = 2
"""Fewest tokens that a draft's source has in common with the end of the text."""
MAX_MATCH = 16
"""Most tokens that are compared."""
MAX_PLACES = 8
"""Latest places that are compared."""
MAX_NEW_TOKENS = 4096
"""Most tokens that enter an index in one step: a long prompt enters in several, and is not drafted from before."""

NUM_AHEAD, NUM_BACK = 16, 4
"""Tokens around the end of the last match where an answer may come back to its source."""

_CLASSES = (1, 2, 3, 4, 5, 8, 16)
_PRIOR_RATES = (0.2, 0.4, 0.2, 0.4, 0.5, 0.7, 0.85, 0.95)
_PRIOR_WEIGHT = 4.0
_FORGETTING = 0.95
_SLOW_FORGETTING = 0.998


class HitRates:
    """How often the token behind a match was the right one, by the length of the match."""

    def __init__(self, prior: "HitRates | None" = None, *, forgetting: float = _FORGETTING) -> None:
        self._prior = prior
        self._forgetting = forgetting
        self._num_hits = [0.0] * len(_PRIOR_RATES)
        self._num_trials = [0.0] * len(_PRIOR_RATES)

    def rate(self, match_len: int) -> float:
        """Return the estimated probability that the next token behind a match of some length is right."""
        return self._rate(bisect_right(_CLASSES, match_len))

    def count(self, match_len: int, *, is_hit: bool) -> None:
        """Take one token into account, here and in the prior."""
        i = bisect_right(_CLASSES, match_len)
        self._num_hits[i] = self._num_hits[i] * self._forgetting + is_hit
        self._num_trials[i] = self._num_trials[i] * self._forgetting + 1
        if self._prior is not None:
            self._prior.count(match_len, is_hit=is_hit)

    def _rate(self, i: int) -> float:
        prior = _PRIOR_RATES[i] if self._prior is None else self._prior._rate(i)  # noqa: SLF001 - of its own class
        return (prior * _PRIOR_WEIGHT + self._num_hits[i]) / (_PRIOR_WEIGHT + self._num_trials[i])


class NgramIndex:
    """Places of every pair of tokens in one text that grows."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """Latest place behind a pair of tokens: the index of the token that followed it."""
        self._earlier = array("i", (-1, -1))
        """For each place, the one before it behind the same pair; -1: there is none."""

    def extend(self, text: TokenArray) -> bool:
        """Enter the next places of a text; returns whether all are in."""
        latest, earlier = self._latest, self._earlier
        stop = min(len(text), len(earlier) + MAX_NEW_TOKENS)
        for place in range(len(earlier), stop):
            pair = text[place - 2] << 32 | text[place - 1]
            earlier.append(latest.get(pair, -1))
            latest[pair] = place
        return stop == len(text)

    def find(self, text: TokenArray) -> tuple[int, int]:
        """Return the place with the longest match before it, of equals the latest, and its length; 0: there is none."""
        if len(text) < MIN_MATCH:
            return -1, 0
        place = self._latest.get(text[-2] << 32 | text[-1], -1)
        found, longest = -1, 0
        for _ in range(MAX_PLACES):
            if place < 0 or longest == MAX_MATCH:
                break
            match_len = _match_len(text, place)
            if match_len > longest:
                found, longest = place, match_len
            place = self._earlier[place]
        return found, longest


def _match_len(text: TokenArray, place: int) -> int:
    """Return how many tokens before a place, which follows the text's last pair, are those at the end of the text."""
    most = min(MAX_MATCH, place)
    end = len(text)
    return next((n for n in range(MIN_MATCH, most) if text[place - 1 - n] != text[end - 1 - n]), most)


class _History:
    """One sequence's index, and the prediction of its next token."""

    def __init__(self, shared_rates: HitRates) -> None:
        self.rates = HitRates(shared_rates)
        self._index = NgramIndex()
        self._num_seen = 0
        self._place, self._match_len = -1, 0
        self._left = -1
        """Place of the token that would have continued the last match; -1: there was none."""

    def catch_up(self, text: TokenArray) -> None:
        """Count how far the prediction was right, and make the next one."""
        for position in range(self._num_seen, len(text)):
            if self._place < 0:
                break
            is_hit = text[self._place] == text[position]
            self.rates.count(self._match_len, is_hit=is_hit)
            if is_hit:
                self._place, self._match_len = self._place + 1, self._match_len + 1
            else:
                self._left = self._place
                self._place, self._match_len = -1, 0
        self._num_seen = len(text)
        self._place, self._match_len = self._index.find(text) if self._index.extend(text) else (-1, 0)
        if not self._match_len and self._left >= 0:
            self._place, self._match_len = self._come_back(text)

    def _come_back(self, text: TokenArray) -> tuple[int, int]:
        """Return a place near the end of the last match, and 1 when the text's last token stands before it, else 0."""
        left, last = self._left, text[-1]
        ahead = range(left + 1, min(left + NUM_AHEAD, len(text)))
        back = range(left, max(0, left - NUM_BACK), -1)
        near = next((place for each in (ahead, back) for place in each if text[place - 1] == last), -1)
        return (near, 1) if near >= 0 else (left + 1, 0)

    def draft(self, text: TokenArray, max_tokens: int) -> Draft:
        """Return what followed the match. A source that reaches the end of the text goes on with the draft itself."""
        if not 0 <= self._place < len(text) or max_tokens <= 0:
            return Draft(token_ids=as_tokens(()), chances=[])
        token_ids = text[self._place : self._place + max_tokens]
        period = len(token_ids)
        while len(token_ids) < max_tokens:
            token_ids += token_ids[: min(period, max_tokens - len(token_ids))]
        rates = (self.rates.rate(self._match_len + i) for i in range(max_tokens))
        return Draft(token_ids=token_ids, chances=list(accumulate(rates, mul)))


class NgramDrafter:
    """A `Drafter` by n-grams."""

    def __init__(self) -> None:
        self._histories: dict[Sequence, _History] = {}
        self._rates = HitRates(forgetting=_SLOW_FORGETTING)

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        """See `Drafter`."""
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(self._rates)
        history.catch_up(sequence.token_ids)
        return history.draft(sequence.token_ids, max_tokens)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._histories.pop(sequence, None)
