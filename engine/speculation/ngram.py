"""Drafts from the text itself: what followed the last tokens when they stood there before, in prompt or answer.

Answers that edit, translate or quote repeat long pieces of their prompts (Saxena, Prompt Lookup Decoding, 2023). Places
are found as LZ77 finds them: each pair of tokens leads to the latest place behind it, and each place to the one before;
of the latest few, the one with the longest common text before it is the draft's source. A token costs O(1): one entry,
and a search of bounded length.

Where an answer leaves its source, it often comes back: a word was replaced, left out or put in between. Until two
tokens match again, the draft continues from the place near the source that has the answer's last token before it, or
else behind the token that was replaced.

Where the common text was continued in several ways, the others are branches of the draft.

The longer the common text, the likelier the draft. How likely is counted for every token of an answer, whether it was
drafted or not, since the prediction was there in any case. Branches are counted by themselves: at equal length they are
less likely than the draft, which is right when they are wrong.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from common.tokens import TokenArray
from engine.executor import ScheduledSequence, StepResult
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
_PRIOR_BRANCH_RATES = (0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)


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

    def find(self, text: TokenArray, most: int = 1) -> list[tuple[int, int]]:
        """Return at most `most` places, whose next tokens differ, and the lengths of the matches before them.

        The longest match comes first, of equals the latest.
        """
        if len(text) < MIN_MATCH:
            return []
        place = self._latest.get(text[-2] << 32 | text[-1], -1)
        longest: dict[int, tuple[int, int]] = {}
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            match_len = _match_len(text, place)
            if match_len > longest.get(text[place], (-1, 0))[1]:
                longest[text[place]] = place, match_len
            if match_len == MAX_MATCH and most == 1:
                break
            place = self._earlier[place]
        return sorted(longest.values(), key=lambda found: (-found[1], -found[0]))[:most]


def _match_len(text: TokenArray, place: int) -> int:
    """Return how many tokens before a place, which follows the text's last pair, are those at the end of the text."""
    most = min(MAX_MATCH, place)
    end = len(text)
    return next((n for n in range(MIN_MATCH, most) if text[place - 1 - n] != text[end - 1 - n]), most)


class _History:
    """One sequence's index, and the prediction of its next token."""

    def __init__(self, shared_rates: HitRates, branch_rates: HitRates, *, num_branches: int) -> None:
        self.rates = shared_rates.of_sequence()
        self._branch_rates = branch_rates
        self._num_branches = num_branches
        self._index = NgramIndex()
        self._num_seen = 0
        self._place, self._match_len = -1, 0
        self._others: list[tuple[int, int]] = []
        """Places of other predictions, and the lengths of their matches."""
        self._left = -1
        """Place of the token that would have continued the last match; -1: there was none."""

    def catch_up(self, text: TokenArray) -> None:
        """Count how far the prediction was right, and make the next one."""
        if self._num_seen < len(text):
            for place, match_len in self._others:
                self._branch_rates.count(match_len, is_hit=text[place] == text[self._num_seen])
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
        found = self._index.find(text, 1 + self._num_branches) if self._index.extend(text) else []
        self._place, self._match_len = found[0] if found else (-1, 0)
        self._others = found[1:]
        if not found and self._left >= 0:
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

    def chances(self, max_tokens: int) -> list[list[float]]:
        """Return the probabilities that the first token of each draft is right, the first two, and so on."""
        if self._place < 0 or max_tokens < 1:
            return []
        chain = self._along(self.rates.rate(self._match_len), self._match_len, max_tokens)
        return [
            chain,
            *(
                self._along(min(self._branch_rates.rate(match_len), chain[0]), match_len, max_tokens)
                for _place, match_len in self._others
            ),
        ]

    def _along(self, first: float, match_len: int, max_tokens: int) -> list[float]:
        """Return the chances of a draft whose first token has the chance `first`."""
        later = (self.rates.rate(match_len + i) for i in range(1, max_tokens))
        return list(accumulate((first, *later), mul))

    def draft(self, text: TokenArray, lens: Seq[int]) -> list[TokenArray]:
        """Return so many tokens of each draft."""
        places = [self._place, *(place for place, _match_len in self._others)]
        return [_following(text, place, num_tokens) for place, num_tokens in zip(places, lens, strict=False)]


def _following(text: TokenArray, place: int, num_tokens: int) -> TokenArray:
    """Return what followed a place. A source that reaches the end of the text goes on with the draft itself."""
    token_ids = text[place : place + num_tokens]
    period = len(token_ids)
    while len(token_ids) < num_tokens:
        token_ids += token_ids[: min(period, num_tokens - len(token_ids))]
    return token_ids


class NgramDrafter:
    """A `Drafter` by n-grams."""

    def __init__(self, *, num_branches: int = 0) -> None:
        """`num_branches`: most drafts beside the first one."""
        self._num_branches = num_branches
        self._histories: dict[Sequence, _History] = {}
        self._rates = HitRates(_CLASSES, _PRIOR_RATES, forgetting=SLOW_FORGETTING)
        self._branch_rates = HitRates(_CLASSES, _PRIOR_BRANCH_RATES, forgetting=SLOW_FORGETTING)

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[list[float]]:
        """See `Drafter`. Learns from the tokens since the last call, whether they were drafted or not."""
        history = self._histories.get(sequence)
        if history is None:
            history = _History(self._rates, self._branch_rates, num_branches=self._num_branches)
            self._histories[sequence] = history
        history.catch_up(sequence.token_ids)
        return history.chances(max_tokens)

    def draft(self, wanted: Mapping[Sequence, Seq[int]]) -> dict[Sequence, list[TokenArray]]:
        """See `Drafter`."""
        return {each: self._histories[each].draft(each.token_ids, lens) for each, lens in wanted.items()}

    def costs_s(self, num_sequences: int, num_tokens: int) -> None:
        """See `Drafter`."""

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """See `Drafter`: it learns from the text."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._histories.pop(sequence, None)
