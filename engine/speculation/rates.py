"""How often drafted tokens were right, by classes of their evidence or their place."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from engine.executor import ScheduledSequence, StepResult

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


class TreeRates:
    """Acceptance of computed drafts by their place, of other first tokens by their rank, and when to try again."""

    def __init__(
        self, prior: Sequence[float], branch_prior: Sequence[float], *, num_branches: int, trial_steps: int
    ) -> None:
        """`num_branches`: most tokens beside a draft's first one.

        `trial_steps`: looks without a draft after which one token of it is taken for likely.
        """
        self._all = HitRates(range(1, len(prior)), prior, forgetting=SLOW_FORGETTING)
        self._by_rank = HitRates(range(1, len(branch_prior)), branch_prior, forgetting=SLOW_FORGETTING)
        self._rates: dict[object, HitRates] = {}
        self._others: dict[object, Sequence[int]] = {}
        """Token ids of the latest draft's branches, likeliest first."""
        self._num_branches = num_branches
        self._trial_steps = trial_steps
        self._num_idle = 0

    def prospects(self, key: object, max_tokens: int) -> list[list[float]]:
        """Return the chances of a draft's first tokens, then of each branch's one token; see `Drafter.prospects`."""
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._all.of_sequence()
        if self._num_idle > self._trial_steps:
            chances = [_TRIAL_CHANCE][:max_tokens]
        else:
            chances = list(accumulate((rates.rate(depth) for depth in range(max_tokens)), mul))
        return [chances, *([min(chances[0], self._by_rank.rate(rank))] for rank in range(self._num_branches))]

    def count_step(self) -> None:
        """Count a step for which a draft is considered."""
        self._num_idle += 1

    def drafted(self, key: object, others: Sequence[int]) -> None:
        """Keep what is likeliest beside the first drafted token of a sequence, whether it is verified or not."""
        self._others[key] = others

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """Take a step with a draft into account, or one without."""
        sequence = item.sequence
        for rank, other in enumerate(self._others.pop(sequence, ())):
            self._by_rank.count(rank, is_hit=other == result.sampled[0].token_id)
        rates = self._rates.get(sequence)
        if rates is None or not item.draft:
            return
        self._num_idle = 0
        for depth in range(min(len(item.draft), result.num_right + 1)):
            rates.count(depth, is_hit=depth < result.num_right)

    def forget(self, key: object) -> None:
        """Drop what is kept for a sequence."""
        self._rates.pop(key, None)
        self._others.pop(key, None)
