"""When sessions come back, as one tenant's turns have shown, and what that says about keeping their blocks.

A turn is of a *kind*: how its answer ended and how fast its session has come back so far. For each kind this keeps how
many turns came back at which age, and for how long turns of each age were waited for: their ratio is the *hazard*, the
rate at which turns of an age come back. Turns that never did count with the time that they were waited for. All are
weighted by their blocks. A kind that was seen rarely is taken to be like its wider kind (`_PRIOR_TURNS`).

The value of a block at an age is the best that keeping it can bring, in returns per second of its page: the maximum
over all times to give it up (the index of Gittins, Bandit Processes and Dynamic Allocation Indices, 1979). A turn is
*like* the age at which an average turn of the tenant has the same value. Since that compares with the tenant's own
blocks, no tenant gains room from another one by it.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from common.return_curve import ReturnCurve

_NUM_BINS = 32
_EDGES_S = (0.0, *(math.exp2(i / 2) for i in range(_NUM_BINS)))
"""Ages from 1 s, two bins for each doubling, to 13 hours."""
_MIDDLES_S: tuple[float, ...] = tuple(math.exp2((i - 0.5) / 2) for i in range(_NUM_BINS))
_PRIOR_TURNS = 4.0
_MIN_TURNS = 64
"""Turns of a tenant before which it is compared with nothing."""
_MAX_TURNS = 4096
"""Turns after which all counts are halved: what was long ago fades."""
_NUM_PACES = 8


class TurnKind(NamedTuple):
    """What is known of a turn when it has ended."""

    calls_tool: bool
    """Whether its answer ended with calls of tools: no person is next."""
    pace: int
    """Rounded binary logarithm of the seconds after which its session came back, lately; -1: it is new."""

    @property
    def wider(self) -> "TurnKind | None":
        """The kind that it is taken to be like."""
        return None if self == ANY_TURN else ANY_TURN if self.pace == _ANY_PACE else self._replace(pace=_ANY_PACE)


_ANY_PACE = -2
ANY_TURN = TurnKind(calls_tool=False, pace=-3)


def pace_of(mean_log_s: float | None) -> int:
    """Return the pace of a session with this mean binary logarithm of the times of its returns; None: of a new one."""
    return -1 if mean_log_s is None else min(_NUM_PACES - 1, max(0, round(mean_log_s)))


@dataclass(slots=True)
class _Seen:
    """Turns of one kind."""

    num_turns: float = 0.0
    returned: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    """Weight of the turns that came back, by age."""
    waited_s: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    """Weight times seconds."""
    weight: float = 0.0
    rates: tuple[float, ...] = ()
    """Value at each age, as of `version`."""
    version: int = -1

    def add(self, age_s: float, weight: float, *, has_returned: bool) -> None:
        self.num_turns += 1
        self.weight += weight
        for i, (begin_s, end_s) in enumerate(pairwise((*_EDGES_S[:_NUM_BINS], math.inf))):
            self.waited_s[i] += weight * (min(age_s, end_s) - begin_s)
            if age_s < end_s:
                self.returned[i] += weight * has_returned
                return

    def halve(self) -> None:
        self.num_turns, self.weight = self.num_turns / 2, self.weight / 2
        self.returned = [each / 2 for each in self.returned]
        self.waited_s = [each / 2 for each in self.waited_s]

    def hazards(self, wider: "list[float] | None") -> list[float]:
        if wider is None:
            return [_ratio(each, waited_s) for each, waited_s in zip(self.returned, self.waited_s, strict=True)]
        prior = _PRIOR_TURNS * self.weight / self.num_turns if self.num_turns else 1.0
        return [
            (each + prior) / (waited_s + prior / rate) if rate else _ratio(each, waited_s)
            for each, waited_s, rate in zip(self.returned, self.waited_s, wider, strict=True)
        ]


class ReturnTimes:
    """The turns of one tenant. Its memory is bounded: there are few kinds."""

    def __init__(self) -> None:
        self._kinds: dict[TurnKind, _Seen] = {ANY_TURN: _Seen()}
        self._curves: dict[TurnKind, ReturnCurve] = {}
        self._num_noted = 0
        self._version = 0

    def note(self, kind: TurnKind, age_s: float, weight: float, *, has_returned: bool) -> None:
        """Note that a turn came back at an age, or was not waited for any longer. `weight`: its blocks."""
        at: TurnKind | None = kind
        while at is not None:
            self._kinds.setdefault(at, _Seen()).add(age_s, weight, has_returned=has_returned)
            at = at.wider
        if self._kinds[ANY_TURN].num_turns > _MAX_TURNS:
            for seen in self._kinds.values():
                seen.halve()
        self._num_noted += 1
        if self._num_noted % _MIN_TURNS == 0:
            self._version += 1
            self._curves.clear()

    def curve(self, kind: TurnKind) -> ReturnCurve | None:
        """Return what turns of a kind are like; None where too little is known, or no answer calls tools."""
        if not self._version or not any(each.calls_tool for each in self._kinds):
            return None
        if kind not in self._curves:
            self._curves[kind] = self._compare(kind)
        return self._curves[kind]

    def _compare(self, kind: TurnKind) -> ReturnCurve:
        own, usual = self._rates(kind), self._rates(ANY_TURN)
        return ReturnCurve(
            like_s=tuple(_like_s(own[i], i, usual) for i in range(_NUM_BINS)), ages_s=_EDGES_S[1:_NUM_BINS]
        )

    def _hazards(self, kind: TurnKind) -> list[float]:
        wider = None if kind.wider is None else self._hazards(kind.wider)
        seen = self._kinds.get(kind)
        if seen is None:
            assert wider is not None, "any turn is known"
            return wider
        return seen.hazards(wider)

    def _rates(self, kind: TurnKind) -> tuple[float, ...]:
        seen = self._kinds.setdefault(kind, _Seen())
        if seen.version != self._version:
            seen.rates, seen.version = _best_rates(self._hazards(kind)), self._version
        return seen.rates


def _ratio(num: float, waited_s: float) -> float:
    return num / waited_s if waited_s > 0 else 0.0


def _best_rates(hazards: list[float]) -> tuple[float, ...]:
    """Return, for each age, the best rate of returns per second of waiting, over all ages to wait until.

    An age counts as worth at least what any later one is: of turns of a kind the oldest ones go first.
    """
    rates = []
    for i in range(_NUM_BINS):
        stay, waited_s, best = 1.0, 0.0, 0.0
        for hazard, begin_s, end_s in zip(hazards[i:], _EDGES_S[i:], _EDGES_S[i + 1 :], strict=False):
            left = stay * math.exp(-hazard * (end_s - begin_s))
            waited_s += (stay - left) / hazard if hazard > 0 else stay * (end_s - begin_s)
            stay = left
            best = max(best, (1 - stay) / waited_s)
        rates.append(best)
    return tuple(accumulate(reversed(rates), max))[::-1]


def _like_s(rate: float, age: int, usual: tuple[float, ...]) -> float:
    """Return the age at which average turns, whose rates fall, have a rate; of several the one next to `age`."""
    last = max((i for i in range(_NUM_BINS) if usual[i] >= rate), default=-1)
    first = min((i for i in range(_NUM_BINS) if usual[i] <= rate), default=_NUM_BINS)
    if first <= last:
        return _MIDDLES_S[min(max(age, first), last)]
    if last < 0:
        return _MIDDLES_S[0]
    if first == _NUM_BINS or not usual[first] or not rate:
        return _MIDDLES_S[last]
    share = math.log(usual[last] / rate) / math.log(usual[last] / usual[first])
    return _MIDDLES_S[last] * math.exp(share * math.log(_MIDDLES_S[first] / _MIDDLES_S[last]))
