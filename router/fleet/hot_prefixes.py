"""The prefixes that requests repeat most often, by digest, for operators.

A *prefix* here is what a request found cached, with the blocks after it that caches had held and have evicted. What
all prompts begin with is one prefix, however they go on. Each request counts half after a minute. When the record is
full, a new prefix replaces the coldest one; memory is bounded by `CAPACITY` and the longest prompt. Neither tokens nor
text are kept, and digests are keyed with the cluster's secret.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from common.block_hash import BlockHashes
from common.clock import Clock
from common.ids import WorkerId
from router.fleet.prefix_match import PrefixMatches

CAPACITY = 48
SHOWN = 12
SHOWN_HOLDERS = 16
_HALF_LIFE_S = 60.0
_DIGEST_CHARS = 12


@dataclass(slots=True)
class _Asked:
    hashes: BlockHashes
    num_requests: float
    used_s: float

    def heat(self, now_s: float) -> float:
        """Return the requests, each of which counts half after a minute."""
        return self.num_requests * math.exp2((self.used_s - now_s) / _HALF_LIFE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedHolder:
    """Part of a prefix that a worker holds."""

    worker_id: WorkerId
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPrefix:
    """A prefix as it is reported."""

    digest: str
    num_blocks: int
    num_requests: float
    age_s: float
    holders: tuple[ReportedHolder, ...]

    @property
    def num_held(self) -> int:
        """Leading blocks that the best worker holds."""
        return max((each.num_blocks for each in self.holders), default=0)


class HotPrefixes:
    """Prefixes by the key of their last block. Event loop only."""

    def __init__(self, clock: Clock, match: Callable[[BlockHashes], PrefixMatches]) -> None:
        """`match` returns which workers hold a prefix."""
        self._clock = clock
        self._match = match
        self._asked: dict[int, _Asked] = {}

    def note(self, hashes: BlockHashes, num_known: int) -> None:
        """Count a request whose leading `num_known` blocks some worker holds or has held."""
        if not num_known:
            return
        now_s, key = self._clock.monotonic(), hashes.keys[num_known - 1]
        known = self._asked.get(key)
        if known is not None:
            known.num_requests, known.used_s = known.heat(now_s) + 1, now_s
            return
        if len(self._asked) >= CAPACITY:
            del self._asked[min(self._asked, key=lambda each: self._asked[each].heat(now_s))]
        self._asked[key] = _Asked(hashes[:num_known], 1.0, now_s)

    def hottest(self) -> list[ReportedPrefix]:
        """Return the hottest ones, hottest first, with the workers that hold them now."""
        now_s = self._clock.monotonic()
        hottest = sorted(self._asked.values(), key=lambda each: -each.heat(now_s))[:SHOWN]
        return [
            ReportedPrefix(
                digest=each.hashes[-1].hex()[:_DIGEST_CHARS],
                num_blocks=len(each.hashes),
                num_requests=each.heat(now_s),
                age_s=now_s - each.used_s,
                holders=tuple(islice(self._holders(each.hashes), SHOWN_HOLDERS)),
            )
            for each in hottest
        ]

    def _holders(self, hashes: BlockHashes) -> Iterator[ReportedHolder]:
        for num_blocks, worker_id in self._match(hashes).longest_holders():
            yield ReportedHolder(worker_id=worker_id, num_blocks=num_blocks)
