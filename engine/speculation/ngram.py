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
from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from common.tokens import TokenArray
from engine.executor import StepResult
from engine.sequence import Sequence
from engine.speculation.rates import SLOW_FORGETTING, HitRates

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
        self.rates = shared_rates.of_sequence()
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
        if near >= 0:
            return near, 1
        return (left + 1, 0) if left + 1 < len(text) else (-1, 0)

    def chances(self, max_tokens: int) -> list[float]:
        """Return the probabilities that the first token of a draft is right, the first two, and so on."""
        if self._place < 0:
            return []
        return list(accumulate((self.rates.rate(self._match_len + i) for i in range(max_tokens)), mul))

    def draft(self, text: TokenArray, num_tokens: int) -> TokenArray:
        """Return what followed the match. A source that reaches the end of the text goes on with the draft itself."""
        token_ids = text[self._place : self._place + num_tokens]
        period = len(token_ids)
        while len(token_ids) < num_tokens:
            token_ids += token_ids[: min(period, num_tokens - len(token_ids))]
        return token_ids


class NgramDrafter:
    """A `Drafter` by n-grams."""

    def __init__(self) -> None:
        self._histories: dict[Sequence, _History] = {}
        self._rates = HitRates(_CLASSES, _PRIOR_RATES, forgetting=SLOW_FORGETTING)

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[float]:
        """See `Drafter`. Learns from the tokens since the last call, whether they were drafted or not."""
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(self._rates)
        history.catch_up(sequence.token_ids)
        return history.chances(max_tokens)

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, TokenArray]:
        """See `Drafter`."""
        return {each: self._histories[each].draft(each.token_ids, num_tokens) for each, num_tokens in wanted.items()}

    def costs_s(self, num_sequences: int, num_tokens: int) -> None:
        """See `Drafter`."""

    def observe(self, sequence: Sequence, num_drafted: int, result: StepResult) -> None:
        """See `Drafter`: it learns from the text."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._histories.pop(sequence, None)
