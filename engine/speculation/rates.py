"""How often drafted tokens were right, by classes of their evidence or their place."""

from bisect import bisect_right
from collections.abc import Sequence

PRIOR_WEIGHT = 4.0
"""Tokens that the rates known before count as."""
FORGETTING = 0.95
"""Share that is left of what one sequence has shown, after each token of a class."""
SLOW_FORGETTING = 0.998
"""The same for all sequences together."""

_TRIAL_CHANCE = 0.99


class HitRates:
    """Rates of one sequence, which begin as those of all sequences, or of all sequences, which begin as a guess."""

    def __init__(
        self, begins: Sequence[int], prior: "Sequence[float] | HitRates", *, forgetting: float = FORGETTING
    ) -> None:
        """`begins`: first value of each class but the first."""
        self._begins = begins
        self._prior = prior
        self._forgetting = forgetting
        self._num_hits = [0.0] * (len(begins) + 1)
        self._num_trials = [0.0] * (len(begins) + 1)

    def of_sequence(self) -> "HitRates":
        """Return rates of one more sequence, which also count here."""
        return HitRates(self._begins, self)

    def rate(self, value: int) -> float:
        """Return the estimated probability that the next token of a class is right."""
        return self._rate(bisect_right(self._begins, value))

    def count(self, value: int, *, is_hit: bool) -> None:
        """Take one token into account, here and for all sequences."""
        i = bisect_right(self._begins, value)
        self._num_hits[i] = self._num_hits[i] * self._forgetting + is_hit
        self._num_trials[i] = self._num_trials[i] * self._forgetting + 1
        if isinstance(self._prior, HitRates):
            self._prior.count(value, is_hit=is_hit)

    def _rate(self, i: int) -> float:
        prior = self._prior._rate(i) if isinstance(self._prior, HitRates) else self._prior[i]  # noqa: SLF001 - its class
        return (prior * PRIOR_WEIGHT + self._num_hits[i]) / (PRIOR_WEIGHT + self._num_trials[i])


class BranchRates:
    """How often the token that was second, third, … likeliest for the first place of a draft was right there."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._all = HitRates(range(1, len(prior)), prior, forgetting=SLOW_FORGETTING)
        self._candidates: dict[object, Sequence[int]] = {}
        """Token ids of the latest draft's branches, likeliest first."""

    def prospects(self, num_branches: int, most: float) -> list[list[float]]:
        """Return the chances of so many branches, of one token each, none above `most`."""
        return [[min(most, self._all.rate(rank))] for rank in range(num_branches)]

    def drafted(self, key: object, token_ids: Sequence[int]) -> None:
        """Keep the candidates for a sequence's next token, whether they are verified or not."""
        self._candidates[key] = token_ids

    def observe(self, key: object, token_id: int) -> None:
        """Take the sequence's next token into account."""
        for rank, candidate in enumerate(self._candidates.pop(key, ())):
            self._all.count(rank, is_hit=candidate == token_id)

    def forget(self, key: object) -> None:
        """Drop what is kept for a sequence."""
        self._candidates.pop(key, None)


class DepthRates:
    """Acceptance of computed drafts by their place, and when to try again where none was worth it."""

    def __init__(self, prior: Sequence[float], *, trial_steps: int) -> None:
        """`trial_steps`: looks without a draft after which one token of it is taken for likely."""
        self._all = HitRates(range(1, len(prior)), prior, forgetting=SLOW_FORGETTING)
        self._rates: dict[object, HitRates] = {}
        self._trial_steps = trial_steps
        self._num_idle = 0

    def prospects(self, key: object, max_tokens: int) -> list[float]:
        """Return the chances of a draft's first tokens; see `Drafter.prospects`."""
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._all.of_sequence()
        if self._num_idle > self._trial_steps:
            return [_TRIAL_CHANCE][:max_tokens]
        chances: list[float] = []
        chance = 1.0
        for depth in range(max_tokens):
            chance *= rates.rate(depth)
            chances.append(chance)
        return chances

    def count_step(self) -> None:
        """Count a step for which a draft is considered."""
        self._num_idle += 1

    def observe(self, key: object, num_drafted: int, num_right: int) -> None:
        """Take a step with a draft into account, or one without."""
        rates = self._rates.get(key)
        if rates is None or not num_drafted:
            return
        self._num_idle = 0
        for depth in range(min(num_drafted, num_right + 1)):
            rates.count(depth, is_hit=depth < num_right)

    def forget(self, key: object) -> None:
        """Drop what is kept for a sequence."""
        self._rates.pop(key, None)
