"""Fits seconds = weights · features to what a worker has measured: never negative, robust, with bounded memory.

Memory is stratified: each bucket of similar features keeps its latest samples, so that hours of steady decoding do not
push out the few long prompts that show what a context token costs. A fit is iteratively reweighted least
squares on relative errors: Cauchy's weights, with the median absolute error as scale (Holland and Welsch, Robust
regression using iteratively reweighted least-squares, 1977), halved with age, and a ridge towards a prior where data do
not tell features apart. Only the proportions of the prior count: it is first scaled to the data, so that ten equal
steps set its speed and leave its shape. Weights stay non-negative by an active set (Lawson and Hanson, Solving Least
Squares Problems, 1974), solved here: SciPy's 130 MB would be in every worker for these forty lines.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_BUCKETS = 64
BUCKET_SAMPLES = 16
HALF_LIFE = 4096.0
"""Number of newer samples that halves the weight of a sample."""
_MIN_AGE_WEIGHT = 1 / 16
_CAUCHY = 2.385  # 95 % efficient when there are no outliers
_MIN_SCALE = 0.01  # timers and schedulers are no better than this
_MIN_SECONDS = 1e-9
_NUM_ROUNDS = 12
_ENOUGH = 2e-3  # rounds end when no prediction moves by a larger share
_MAX_DRIFT = 0.1
_ENOUGH_SAMPLES = 64
_FEW_SAMPLES, _FEW_SAMPLES_S = 8, 1.0  # enough if they take that long
_LEAP = 2.0  # factor by which few samples, and the latest of them, have to differ
_NUM_LATEST = 4


class RobustFit:
    """One linear model. Not thread-safe; `add` is O(1), `fit` is linear in the samples remembered."""

    def __init__(self, prior: Sequence[float]) -> None:
        """Start with the weights `prior`: none negative, not all zero."""
        self._prior = np.asarray(prior, dtype=np.float64)
        self._buckets: dict[tuple[int, ...], deque[tuple[float, ...]]] = {}
        self._num_fitted = 0
        self._new_s = 0.0
        """Sum of the samples since the last fit."""
        self._has_leapt = False
        """Whether few samples have changed the speed: few may change it back, though fast ones take no second."""
        self.num_samples = 0

    def add(self, features: tuple[int, ...], seconds: float) -> None:
        """Remember a sample for the next `fit`. Features are not negative."""
        self.num_samples += 1
        self._new_s += seconds
        key = tuple([feature.bit_length() for feature in features])
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = deque(maxlen=BUCKET_SAMPLES)
            if len(self._buckets) >= MAX_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = bucket  # at the end: the first bucket is the least recently used
        bucket.append((*features, seconds, self.num_samples))

    @property
    def num_new(self) -> int:
        """Samples since the last fit."""
        return self.num_samples - self._num_fitted

    @property
    def has_informative_news(self) -> bool:
        """Whether the samples since the last fit can tell a change of speed from noise.

        A few long ones can: a slow worker that is avoided, or a large model, takes minutes for 64.
        """
        is_long = self._has_leapt or self._new_s >= _FEW_SAMPLES_S
        return self.num_new >= _ENOUGH_SAMPLES or (self.num_new >= _FEW_SAMPLES and is_long)

    def fit(self) -> tuple[float, ...]:
        """Return the weights, finite and not negative; the prior before the first sample.

        When the latest samples agree on a speed that the weights do not explain, the machine has become faster or
        slower. Older samples are then restated at the new speed; otherwise the latest would count as outliers for long.
        """
        if not self._buckets:
            return tuple(self._prior.tolist())
        weights, ratio = self._weigh()
        if abs(math.log(ratio)) > _MAX_DRIFT:
            self._has_leapt = self.num_new < _ENOUGH_SAMPLES
            oldest_new = self._num_fitted + 1
            for bucket in self._buckets.values():
                for position, (*features, seconds, order) in enumerate(bucket):
                    if order < oldest_new:
                        bucket[position] = (*features, seconds * ratio, order)
            weights, _ratio = self._weigh()
        self._num_fitted, self._new_s = self.num_samples, 0.0
        return tuple(weights.tolist())

    def _weigh(self) -> tuple[Array, float]:
        """Return the weights, and the median of measured / predicted seconds since the last fit; 1 if it is no news."""
        rows = np.array([row for bucket in self._buckets.values() for row in bucket], dtype=np.float64)
        features, seconds, order = rows[:, :-2], np.maximum(rows[:, -2], _MIN_SECONDS), rows[:, -1]
        age_weights = np.maximum(np.exp2((order - self.num_samples) / HALF_LIFE), _MIN_AGE_WEIGHT)
        weights = fit_weights(features, seconds, age_weights, self._prior)
        is_new = order > self._num_fitted
        if is_new.all() or not self.has_informative_news:
            return weights, 1.0
        ratios = seconds[is_new] / np.maximum(features[is_new] @ weights, _MIN_SECONDS)
        ratio = float(np.median(ratios))
        if self.num_new >= _ENOUGH_SAMPLES:
            return weights, ratio
        # Few samples have to differ much, the latest as much as all: a stall may be over.
        latest = float(np.median(ratios[np.argsort(order[is_new])[-_NUM_LATEST:]]))
        return weights, ratio if min(ratio, latest) > _LEAP or max(ratio, latest) < 1 / _LEAP else 1.0


def fit_weights(features: Array, seconds: Array, sample_weights: Array, prior: Array) -> Array:
    """Return the weights [num_features] for features [num_samples, num_features] and positive seconds."""
    guessed = np.maximum(features @ prior, _MIN_SECONDS)
    prior = prior * float(np.median(seconds / guessed))
    ridge = 1 / len(seconds)
    weights = prior
    for _ in range(_NUM_ROUNDS):
        predicted = np.maximum(features @ weights, _MIN_SECONDS)
        ratios = seconds / predicted
        errors = np.abs(np.log(ratios))
        scale = _CAUCHY * max(1.4826 * float(np.median(errors)), _MIN_SCALE)
        # The second factor bounds the effect of steps 20 times too slow while the scale is still of a wrong model.
        trust = sample_weights / (1 + (errors / scale) ** 2) / np.maximum(1.0, np.abs(ratios - 1) / scale)
        before, weights = weights, _solve(features / predicted[:, None], seconds / predicted, trust, prior, ridge)
        if (np.abs(features @ (weights - before)) <= _ENOUGH * predicted).all():
            break
    return weights


def _solve(features: Array, targets: Array, trust: Array, prior: Array, ridge: float) -> Array:
    """Return the non-negative ridge solution; features that are always 0 keep their prior."""
    weighted = features * trust[:, None]
    products, moments = features.T @ weighted, targets @ weighted
    norms = np.sqrt(np.diag(products))
    seen = np.flatnonzero(norms > 0)
    norms = norms[seen]
    # In units in which every feature has norm 1, so that the ridge is the same for tokens and for pairs.
    products = products[np.ix_(seen, seen)] / np.outer(norms, norms) + ridge * np.eye(len(seen))
    moments = moments[seen] / norms + ridge * prior[seen] * norms
    weights = prior.copy()
    weights[seen] = solve_non_negative(products, moments) / norms
    return weights


def solve_non_negative(products: Array, moments: Array) -> Array:
    """Return x >= 0 that minimizes x·products·x / 2 - moments·x; `products` [n, n] is positive definite."""
    solution: Array = np.linalg.solve(products, moments).astype(np.float64)
    if (solution >= 0).all():
        return solution
    solution = np.zeros(len(moments))
    free = np.zeros(len(moments), dtype=bool)
    tolerance = 1e-12 * float(np.abs(moments).max())
    for _ in range(3 * len(moments)):
        slope = np.where(free, -np.inf, moments - products @ solution)
        if slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        solution = _descend(products, moments, solution, free)
    return solution


def _descend(products: Array, moments: Array, solution: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Return the minimum over the free entries; those that would become negative are bound to 0. Mutates `free`."""
    while True:
        at = np.flatnonzero(free)
        trial = np.zeros_like(solution)
        trial[at] = np.linalg.solve(products[np.ix_(at, at)], moments[at])
        bad = at[trial[at] <= 0]
        if not len(bad):
            return trial
        step = float(np.min(solution[bad] / (solution[bad] - trial[bad])))
        solution += step * (trial - solution)
        free[bad[solution[bad] <= 1e-15]] = False
        if not free.any():
            return np.zeros_like(solution)
        solution[~free] = 0.0
