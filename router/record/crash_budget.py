"""Workers that were lost while they computed one request: a request that crashes them must not take all of them.

A crash fails every request on the worker, and nothing shows which one caused it. A request that loses one worker after
the other with hardly a new token in between is suspected: before the last worker that `router.max_lost_workers` grants,
it is quarantined, so that no other quarantined request runs on the same worker; the worker refuses those of other
routers (worker/prefill_gate.py). Innocent ones are separated from the guilty one this way and get their answers; a
request that loses its worker in quarantine is refused.
"""

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common.clock import Clock
from common.errors import CrashSuspected
from router.fleet.lives import Life

if TYPE_CHECKING:
    from router.fleet.booking import WorkerBooking
    from router.record.record import RunningRequest

logger = logging.getLogger(__name__)

REFUSED_FOR_S = 600.0
"""How long a refused request is refused when its tenant sends it again: clients retry."""
MAX_REFUSED = 1024

NUM_CLEARING_TOKENS = 32
"""New tokens that clear a request of its losses. A worker may die of a token before it has sent the last ones, and the
next worker generates these again before it dies of the same token: what it generates in a second proves nothing."""


class FailedAttempt(NamedTuple):
    """An attempt that failed."""

    failed_s: float
    lives: tuple[Life, ...]
    """Lives that had work for the request. A host that takes two of them along is one loss."""


@dataclass(slots=True, eq=False)
class Losses:
    """Lives of workers that failed under one request since it was cleared."""

    attempts: list[FailedAttempt] = field(default_factory=list)
    is_quarantined: bool = False
    _num_tokens: int = 0
    """Tokens that each unfinished sample had, at least, at the first of the losses: a sample that crashes its workers
    has no new ones, whatever the others have."""

    def note(self, lives: Iterable[Life], *, num_tokens: int, now_s: float) -> None:
        """Add lives whose call failed when every sample had `num_tokens` tokens; enough new ones clear the others."""
        if not self.attempts:
            self._num_tokens = num_tokens
        elif num_tokens - self._num_tokens >= NUM_CLEARING_TOKENS:
            self._num_tokens = num_tokens
            self.is_quarantined = False
            self.attempts.clear()
        self.attempts.append(FailedAttempt(now_s, tuple(lives)))

    @property
    def lives(self) -> list[Life]:
        """All lives, each once."""
        return list(dict.fromkeys(life for attempt in self.attempts for life in attempt.lives))

    def count(self, ended: Mapping[Life, float]) -> int:
        """Return how many losses the lives in `ended` make up: at most one for an attempt, one for a life.

        `ended`: when each of them was last ready. One that was ready after an attempt had failed has ended for another
        reason. This is the size of a maximum matching of attempts and lives (augmenting paths).
        """
        claimed: dict[Life, FailedAttempt] = {}
        """Attempt that each life accounts for."""

        def claim(attempt: FailedAttempt, tried: set[Life]) -> bool:
            for life in attempt.lives:
                if life not in tried and ended.get(life, math.inf) <= attempt.failed_s:
                    tried.add(life)
                    if life not in claimed or claim(claimed[life], tried):
                        claimed[life] = attempt
                        return True
            return False

        return sum(claim(attempt, set()) for attempt in dict.fromkeys(self.attempts))

    def __str__(self) -> str:
        return ", ".join(worker_id for worker_id, _epoch in self.lives)


class CrashBudget:
    """Decides whether a request that has lost workers gets another one. Event loop only."""

    def __init__(
        self,
        max_lost_workers: int,
        find_ended: Callable[[Collection[Life]], Awaitable[Mapping[Life, float]]],
        clock: Clock,
    ) -> None:
        """`find_ended` returns those of some lives that are over, and when each was last ready."""
        self._max_lost = max_lost_workers
        self._find_ended = find_ended
        self._clock = clock
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()
        """Ends of refusals by digest of tenant, prompt and structure."""

    async def weigh(self, record: "RunningRequest", failed: "WorkerBooking", *, samples: Collection[int]) -> None:
        """Quarantine a request that has lost almost its last worker. Raises CrashSuspected after the last one.

        `failed`: where these samples ran last. Several attempts of a request run side by side when its samples are
        served apart, and one that was not in quarantine may have lost its worker to another request: it gets one more.
        So does one whose last worker has never answered: that may have died before, and its router has not known.
        """
        losses = record.losses
        if len(losses.attempts) < self._max_lost - 1:
            return
        num_lost = losses.count(await self._find_ended(losses.lives))
        losses.is_quarantined = num_lost >= self._max_lost - 1
        is_apart = len(samples) < record.job.sampling.n
        is_in_doubt = (is_apart and not failed.is_quarantined) or not failed.has_answered
        if num_lost < self._max_lost + is_in_doubt:
            return
        job = record.job
        extra = {
            "request_id": job.request_id,
            "tenant": record.tenant.name,
            "num_prompt_tokens": len(job.prompt_token_ids),
            "num_output_tokens": record.ledger.num_tokens,
            "sampling": repr(job.sampling),
        }
        logger.error("request refused: %d workers were lost under it: %s", num_lost, losses, extra=extra)
        digest = _digest(record)
        self._refused_until_s[digest] = self._clock.monotonic() + REFUSED_FOR_S
        self._refused_until_s.move_to_end(digest)
        if len(self._refused_until_s) > MAX_REFUSED:
            self._refused_until_s.popitem(last=False)
        raise CrashSuspected(
            f"refused: {num_lost} workers were lost, one after the other, while they computed this request ({losses})"
        )

    def check(self, record: "RunningRequest") -> None:
        """Raise CrashSuspected for a request of the same tenant that was refused lately."""
        if not self._refused_until_s:
            return
        left_s = self._refused_until_s.get(_digest(record), 0.0) - self._clock.monotonic()
        if left_s > 0:
            raise CrashSuspected(
                "refused: workers were lost, one after the other, while they computed this prompt;"
                f" it is taken again in {left_s:.0f} s"
            )


def _digest(record: "RunningRequest") -> bytes:
    digest = hashlib.blake2b(record.job.prompt_token_ids, digest_size=16)
    digest.update(repr((record.tenant.name, record.job.sampling.structured_outputs)).encode())
    return digest.digest()
