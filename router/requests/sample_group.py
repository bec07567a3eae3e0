"""Samples of a request that are served together, over all their attempts."""

from dataclasses import dataclass, field

from common.lifecycle import LifeCycle
from router.fleet.lives import Life
from router.record.record import RunningRequest


@dataclass(slots=True, eq=False, kw_only=True)
class SampleGroup:
    """Samples of a request that are served together."""

    record: RunningRequest
    samples: range
    life: LifeCycle
    num_attempts: int = 0
    num_moves: int = 0
    """Attempts that ended because their worker was leaving or the answer was set back; nothing had failed."""
    num_set_back: int = 0
    is_set_back: bool = False
    """Whether the last attempt ended so."""
    failed_pairs: set[tuple[Life, Life]] = field(default_factory=set)
    """Lives of the prefill and decode workers of the attempts that failed before the handoff was complete."""

    @property
    def num_blocks(self) -> int:
        """Pages that its samples fill: they share those of the prompt."""
        job, lengths = self.record.job, self.record.ledger.lengths
        num_tokens = len(job.prompt_token_ids) + sum(lengths[index] for index in self.samples)
        return num_tokens // job.model.block_size + len(self.samples)
