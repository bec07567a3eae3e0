"""Takes in prefixes that another worker names: those of a worker that leaves, or the first ones of a new worker.

Chains are pulled most valuable first, in pieces of a few megabytes. Each piece is pulled like the prefix of a request
(`prefix_pull.py`: pinned there, verified and published here), and the engine serves others between two pieces. A piece
gets only pages that are empty or hold less valuable blocks, and none that waiting requests need.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import KvrelayError
from common.prefix_chains import PrefixChain, whole_chain
from kvrelay.v1 import sequence_pb2
from worker.prefix_pull import PrefixPuller, PullOutcome

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
_GOES_ON = (PullOutcome.PULLED, PullOutcome.PRESENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimit:
    """Limits of one list."""

    time_s: float
    max_bytes: int


@dataclass(slots=True, kw_only=True)
class Intake:
    """Result of one list."""

    num_pulled: int = 0
    """Blocks that were pulled."""
    num_present: int = 0
    """Blocks that were here already."""


class PrefixIntake:
    """Takes in lists for one worker, one at a time. Event loop only."""

    def __init__(self, puller: PrefixPuller, *, block_bytes: int) -> None:
        self._puller = puller
        self._block_bytes = block_bytes
        self._one_at_a_time = asyncio.Lock()

    async def take(self, chains: Sequence[PrefixChain], source: sequence_pb2.KvSource, limit: IntakeLimit) -> Intake:
        """Pull what fits. Raises KvrelayError when the source fails before the first block; later blocks stay."""
        intake = Intake()
        num_at_most = limit.max_bytes // self._block_bytes
        try:
            async with asyncio.timeout(limit.time_s), self._one_at_a_time:
                for idx, chain in enumerate(chains):
                    if num_at_most <= intake.num_pulled:
                        break
                    whole = whole_chain(chains, idx)
                    await self._take_chain(whole, chain.num_shared, source, num_at_most, intake)
        except TimeoutError:
            pass
        except KvrelayError as error:
            if not intake.num_pulled:
                raise
            logger.warning("source of prefixes lost", extra={"source": source.worker_id, "reason": str(error)})
        extra = {"source": source.worker_id, "num_pulled": intake.num_pulled, "num_present": intake.num_present}
        logger.info("prefixes taken in", extra=extra)
        return intake

    async def _take_chain(
        self, whole: PrefixChain, num_shared: int, source: sequence_pb2.KvSource, num_at_most: int, intake: Intake
    ) -> None:
        num_here = 0
        num_piece = max(1, PIECE_BYTES // self._block_bytes)
        while num_here < len(whole.hashes) and intake.num_pulled < num_at_most:
            max_blocks = min(num_piece, num_at_most - intake.num_pulled)
            brought = await self._puller.bring(whole, source, max_blocks=max_blocks)
            intake.num_present += max(0, brought.num_cached - max(num_here, num_shared))
            intake.num_pulled += brought.num_here - brought.num_cached
            if brought.outcome not in _GOES_ON or brought.num_here <= num_here:
                return
            num_here = brought.num_here
