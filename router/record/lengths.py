"""How long answers will be, learned online from the answers so far.

A *length distribution* counts answers by their length, in bins of a quarter of an octave. There is one for all answers,
one for each tenant, one for each *kind* of request of a tenant (sizes of prompt and limit, chat or not, samples, stop
strings), and one for each of some prefixes of prompts: of 1, 2, 4, 8 … blocks, so that an application's template and
the earlier turns of a chat are found by a few lookups. A prediction starts from all answers and moves to narrower
distributions, those of the tenant, the kind and the longest known prefix, the one of most answers first, and to each as
far as its own count goes (Dirichlet smoothing):

    p = (counts + PRIOR_WEIGHT * p_broader) / (total + PRIOR_WEIGHT)

Prefixes are those of salted block hashes, so that tenants share no more of them than of their KV.

*Limits.* An answer of `max_tokens` tokens was cut: it would have had this length or more. Its count is spread over the
lengths that it may have had, as likely as they were predicted to be (Efron's redistribution, one answer at a time), so
that short limits do not make answers with long ones seem short. An expectation is the mean of min(length, max_tokens),
which is less than the mean of lengths cut at max_tokens. Answers that ignore the end of sequence say nothing about
others and are not learned.

A prediction or an answer costs four steps over a few dozen numbers and a logarithm of the prompt's blocks. Kinds and
prefixes that were not used for longest are forgotten.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.record.record import Job

Floats = npt.NDArray[np.float64]

GUESSED_TOKENS = 256.0
"""Assumed mean length before the first answer."""
BINS_PER_OCTAVE = 4
NUM_BINS = 17 * BINS_PER_OCTAVE + 1
"""Lengths from 1 to 2**17 tokens; longer ones count as the last bin."""
PRIOR_WEIGHT = 4.0
"""Answers that a broader distribution counts for in a narrower one."""
MAX_COUNT = 256.0
"""Count at which a distribution is halved, so that it follows what changes."""
MAX_KINDS = 1024
MAX_PREFIXES = 16384
LOWER, UPPER = 0.1, 0.9
"""Quantiles of the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthForecast:
    """How long one answer will be, or the rest of one, in tokens."""

    mean: float
    lower: float
    """One answer in ten is shorter."""
    upper: float
    """One answer in ten is longer."""

    @property
    def num_tokens(self) -> int:
        """The mean as a number of tokens, at least 1."""
        return max(1, round(self.mean))


class _Distribution:
    """Counts of answers by length."""

    __slots__ = ("counts", "num_answers", "total")

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_BINS, dtype=np.float32)
        self.total = 0.0
        self.num_answers = 0
        """Answers counted so far, forgotten ones included."""

    def smooth(self, broader: Floats) -> Floats:
        """Return the probabilities of the bins, given those of a broader distribution."""
        smoothed: Floats = (self.counts + PRIOR_WEIGHT * broader) / (self.total + PRIOR_WEIGHT)
        return smoothed

    def add(self, weights: Floats) -> None:
        """Count one answer, spread over the bins."""
        self.counts += weights
        self.total += 1.0
        self.num_answers += 1
        if self.total >= MAX_COUNT:
            self.counts /= 2
            self.total /= 2


class _Table:
    """Distributions by key; the ones used longest ago are forgotten."""

    def __init__(self, max_entries: int) -> None:
        self._entries: OrderedDict[Hashable, _Distribution] = OrderedDict()
        self._max_entries = max_entries

    def find(self, *keys: Hashable) -> _Distribution | None:
        """Return the distribution of the first key that has one."""
        return next((found for key in keys if (found := self._entries.get(key)) is not None), None)

    def add(self, key: Hashable, weights: Floats) -> None:
        """Count an answer under the key."""
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = _Distribution()
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        found.add(weights)


class AnswerLengths:
    """Predicts lengths of answers. Event loop only."""

    def __init__(self) -> None:
        self._all = _Distribution()
        self._kinds = _Table(MAX_KINDS)
        self._prefixes = _Table(MAX_PREFIXES)
        self._sizes = 2.0 ** ((np.arange(NUM_BINS) + 0.5) / BINS_PER_OCTAVE)
        """Length that stands for each bin: the mean of its answers."""
        self._num_sized = np.ones(NUM_BINS)
        self._guess = _exponential(GUESSED_TOKENS)

    @property
    def typical_tokens(self) -> int:
        """Mean length of all answers."""
        return max(1, round(float(self._all.smooth(self._guess) @ self._sizes)))

    def expect(self, job: Job, tenant: str, *, num_done: int = 0) -> LengthForecast:
        """Predict one answer; or its rest, when it has `num_done` tokens and goes on."""
        sampling = job.sampling
        most = sampling.max_tokens
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            return LengthForecast(mean=most - num_done, lower=most - num_done, upper=most - num_done)
        probabilities = self._probabilities(job, tenant)
        least = max(sampling.min_tokens, num_done + 1)
        probabilities = _at_least(probabilities, num_done + 1)
        sizes = np.clip(self._sizes, least, max(most, least)) - num_done
        lower, upper = np.searchsorted(probabilities.cumsum(), (LOWER, UPPER)).clip(max=NUM_BINS - 1)
        return LengthForecast(mean=float(probabilities @ sizes), lower=float(sizes[lower]), upper=float(sizes[upper]))

    def learn(self, job: Job, tenant: str, num_tokens: Iterable[int]) -> None:
        """Learn from the lengths of a request's answers, all of which are complete."""
        if job.sampling.ignore_eos:
            return
        for length in num_tokens:
            weights = self._weights(job, tenant, length)
            self._all.add(weights)
            self._kinds.add(tenant, weights)
            self._kinds.add(_kind(job, tenant), weights)
            for key in _prefixes(job):
                self._prefixes.add(key, weights)

    def _weights(self, job: Job, tenant: str, length: int) -> Floats:
        """Return what an answer adds to the counts."""
        if length >= job.sampling.max_tokens:
            return _at_least(self._probabilities(job, tenant), length)
        weights = np.zeros(NUM_BINS)
        number = _bin(length)
        weights[number] = 1.0
        self._num_sized[number] = min(self._num_sized[number] + 1, MAX_COUNT)
        self._sizes[number] += (length - self._sizes[number]) / (self._num_sized[number] - 1)
        return weights

    def _probabilities(self, job: Job, tenant: str) -> Floats:
        found = [self._kinds.find(tenant), self._kinds.find(_kind(job, tenant)), self._prefixes.find(*_prefixes(job))]
        known = [each for each in found if each is not None]
        known.sort(key=lambda each: -each.num_answers)
        probabilities = self._all.smooth(self._guess)
        for distribution in known:
            probabilities = distribution.smooth(probabilities)
        return probabilities


def _bin(num_tokens: int) -> int:
    return min(int(BINS_PER_OCTAVE * math.log2(max(1, num_tokens))), NUM_BINS - 1)


def _at_least(probabilities: Floats, num_tokens: int) -> Floats:
    """Return the probabilities given that the answer has at least so many tokens."""
    rest = probabilities.copy()
    rest[: _bin(num_tokens)] = 0.0
    rest /= rest.sum()
    return rest


def _exponential(mean: float) -> Floats:
    edges = 2.0 ** (np.arange(NUM_BINS) / BINS_PER_OCTAVE)
    survival = np.append(np.exp(-(edges - 1.0) / mean), 0.0)
    probabilities: Floats = survival[:-1] - survival[1:]
    return probabilities


def _kind(job: Job, tenant: str) -> Hashable:
    """Return what is known of a request before it runs, roughly."""
    sampling = job.sampling
    return (
        tenant,
        int(2 * math.log2(max(1, len(job.prompt_token_ids)))),
        sampling.max_tokens.bit_length(),
        bool(job.rendered_unix_s),
        sampling.n > 1,
        bool(sampling.stop or sampling.stop_token_ids),
    )


def _prefixes(job: Job) -> Iterator[int]:
    """Yield the keys of the prefixes that are looked at, longest first."""
    keys = job.prompt_hashes.keys
    for exponent in range(len(keys).bit_length() - 1, -1, -1):
        yield keys[(1 << exponent) - 1]
