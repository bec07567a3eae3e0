"""The load of workers as a router knows it: one record for each, and arrays over each pool.

A decision among hundreds of workers may not look at each of them in turn. It compares whole arrays, picks a few workers
and reads only their records.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.ids import WorkerId
from common.timing import GUESSED_TIMING, TimingModel

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedLoad:
    """A ready worker: its last report plus what this router has booked on it since."""

    worker_id: WorkerId
    num_blocks: int
    num_free_blocks: int
    num_growth_blocks: float = 0.0
    """Free pages that its answers will probably fill before enough of them end."""
    num_free_slots: float = math.inf
    """Sequences that may still join its batch."""
    num_sequences: int = 0
    """Running, waiting and reserved sequences."""
    num_waiting: int = 0
    """Sequences of the last report that wait for pages or for their KV."""
    num_pending_prefill_tokens: int = 0
    num_decodes: int = 0
    """Sequences that decode, or will as soon as their KV has arrived."""
    num_context_tokens: int = 0
    """KV tokens of these sequences."""
    num_answer_tokens: float = 0.0
    """Expected length of this router's answers there, in the mean; 0 without any."""
    tpot_slos: tuple[float, ...] = ()
    """Different objectives for the mean gap of this router's requests that decode there."""
    prefill_free_at_s: float = 0.0
    """Time at which every prompt accepted or booked so far is computed, as the worker predicts; in the past when there
    is none."""
    num_cold_blocks: int = 0
    """Free pages whose content is not worth keeping."""
    num_cached_blocks: int = 0
    """Free pages that hold reusable KV."""
    num_active_requests: int = 0
    """This router's requests on the worker that have not ended."""
    num_active_prefills: int = 0
    """Active requests whose prompt the worker computes and whose first token has not arrived."""
    num_active_prefill_tokens: int = 0
    """Prompt tokens of the active prefills, cached ones included."""
    num_active_missing_tokens: int = 0
    """Prompt tokens of the active prefills that are not predicted to be cached."""
    num_active_blocks: int = 0
    """Pages that the active requests occupy."""
    tier_free_at_s: float = 0.0
    """Predicted end of the reads from its tiers that this router has booked; in the past when there is none."""
    timing: TimingModel = GUESSED_TIMING

    def prefill_wait_s(self, now_s: float) -> float:
        """Return how long a prompt that arrives now waits for those before it."""
        return max(0.0, self.prefill_free_at_s - now_s)

    def tier_read_s(self, num_bytes: int, now_s: float) -> float:
        """Return how long bytes take to come from its tiers, after the reads before them; 0 for none."""
        if num_bytes <= 0:
            return 0.0
        return max(0.0, self.tier_free_at_s - now_s) + self.timing.tier_read_s(num_bytes)

    def has_pages(self, *, num_blocks: int, num_growth_blocks: float, num_gone: int, num_gone_blocks: float) -> bool:
        """Return whether it had pages for a request if `num_gone` of its sequences gave `num_gone_blocks` back.

        The rule is that of `PoolLoads.with_room`; of the pages kept for their growth the others keep their part.
        """
        num_left = self.num_decodes - num_gone
        num_free_blocks = self.num_free_blocks + num_gone_blocks
        if num_left <= 0:
            return num_free_blocks >= num_blocks
        num_kept_blocks = self.num_growth_blocks * math.sqrt(num_left / self.num_decodes)
        return num_free_blocks - num_kept_blocks >= num_blocks + num_growth_blocks

    @property
    def num_ends_per_s(self) -> float:
        """Answers that end per second, in the mean; infinite while the length or the gaps of answers are not known."""
        if not self.num_decodes:
            return 0.0
        if not self.num_answer_tokens or not self.timing.token_gap.is_measured:
            return math.inf
        gap_s = self.timing.itl_s(self.num_decodes, self.num_context_tokens)
        return self.num_decodes / (self.num_answer_tokens * gap_s) if gap_s else math.inf


class PoolLoads:
    """The loads of one pool, in a fixed order of its workers. Event loop only."""

    def __init__(self, loads: Iterable[ProjectedLoad]) -> None:
        self.loads = list(loads)
        self._numbers = np.array([_numbers(load) for load in self.loads], dtype=np.float64).reshape(-1, 8).T.copy()
        self._positions: dict[WorkerId, int] | None = None
        self._most: tuple[float, float, float] | None = None
        """Most free slots, free pages less those kept, and free pages of a worker on which nothing decodes."""

    def __len__(self) -> int:
        return len(self.loads)

    def __iter__(self) -> Iterator[ProjectedLoad]:
        return iter(self.loads)

    @property
    def prefill_free_at_s(self) -> Floats:
        """As in `ProjectedLoad`, like the columns below."""
        return self._column(0)

    @property
    def num_free_blocks(self) -> Floats:
        """Free pages."""
        return self._column(1)

    @property
    def num_blocks(self) -> Floats:
        """All pages."""
        return self._column(2)

    @property
    def num_decodes(self) -> Floats:
        """Sequences that decode."""
        return self._column(3)

    @property
    def num_context_tokens(self) -> Floats:
        """KV tokens of these sequences."""
        return self._column(4)

    @property
    def num_free_slots(self) -> Floats:
        """Sequences that may still join the batch; an idle worker takes a lone prompt with any number of samples."""
        return self._column(5)

    @property
    def num_growth_blocks(self) -> Floats:
        """Free pages kept for running answers."""
        return self._column(6)

    def answer_ends_in_s(self) -> float:
        """Return the mean time until another answer ends, so that its place is free; 0 while that is not known."""
        num_ends_per_s = float(self._column(7).sum())
        return 1.0 / num_ends_per_s if num_ends_per_s else 0.0

    def soonest(self, num_workers: int) -> list[ProjectedLoad]:
        """Return the workers that are free soonest for another prompt."""
        return [self.loads[position] for position in lowest(self.prefill_free_at_s, num_workers, tied=lambda at: at)]

    def find(self, worker_id: WorkerId) -> ProjectedLoad | None:
        """Return the load of a worker; None for one that is not here."""
        position = self._by_id.get(worker_id)
        return None if position is None else self.loads[position]

    def replace(self, load: ProjectedLoad) -> None:
        """Replace the load of a worker that is here."""
        position = self._by_id[load.worker_id]
        self.loads[position] = load
        self._numbers[:, position] = _numbers(load)
        self._most = None

    def with_room(self, *, num_blocks: int, num_growth_blocks: float) -> "PoolLoads":
        """Return the workers with pages for a request and for what its answers are expected to grow.

        A worker without answers takes any request that it can begin.
        """
        has_room = self.num_free_blocks - self.num_growth_blocks >= num_blocks + num_growth_blocks
        return self.where(has_room | ((self.num_decodes == 0) & (self.num_free_blocks >= num_blocks)))

    def may_hold(self, *, num_sequences: int, num_blocks: int, num_growth_blocks: float) -> bool:
        """Return False only when no worker has slots and pages for a request.

        Costs three comparisons until a load changes: slots and pages may be those of different workers.
        """
        if self._most is None:
            free = self.num_free_blocks
            self._most = (
                float(self.num_free_slots.max(initial=-math.inf)),
                float((free - self.num_growth_blocks).max(initial=-math.inf)),
                float(free.max(initial=-math.inf, where=self.num_decodes == 0)),
            )
        most_slots, most_room, most_idle = self._most
        return most_slots >= num_sequences and (most_room >= num_blocks + num_growth_blocks or most_idle >= num_blocks)

    def where(self, mask: npt.NDArray[np.bool_]) -> "PoolLoads":
        """Return the loads that a mask selects; itself when that is all."""
        if mask.all():
            return self
        positions = np.flatnonzero(mask)
        part = PoolLoads(())
        part.loads = [self.loads[position] for position in positions.tolist()]
        part._numbers = self._numbers[:, positions]
        return part

    def without(self, worker_ids: Collection[WorkerId]) -> "PoolLoads":
        """Return the loads of all other workers."""
        mask = np.ones(len(self), dtype=np.bool_)
        mask[[self._by_id[worker_id] for worker_id in worker_ids if worker_id in self._by_id]] = False
        return self.where(mask)

    def _column(self, number: int) -> Floats:
        column: Floats = self._numbers[number]
        return column

    @property
    def _by_id(self) -> dict[WorkerId, int]:
        if self._positions is None:
            self._positions = {load.worker_id: position for position, load in enumerate(self.loads)}
        return self._positions


def _numbers(load: ProjectedLoad) -> tuple[float, ...]:
    return (
        load.prefill_free_at_s,
        load.num_free_blocks,
        load.num_blocks,
        load.num_decodes,
        load.num_context_tokens,
        load.num_free_slots if load.num_sequences else math.inf,
        load.num_growth_blocks,
        load.num_ends_per_s,
    )


def lowest(keys: Floats, num_lowest: int, *, tied: Callable[[Positions], npt.ArrayLike]) -> list[int]:
    """Return the positions of the lowest keys; equal ones go by what `tied` returns for their positions, then by order.

    Costs O(len(keys)) array operations; `tied` is asked only about keys that are equal to the last one returned.
    """
    if len(keys) <= num_lowest:
        return list(range(len(keys)))
    last = np.partition(keys, num_lowest - 1)[num_lowest - 1]
    below, equal = np.flatnonzero(keys < last), np.flatnonzero(keys == last)
    num_equal = num_lowest - len(below)
    if len(equal) > num_equal:
        equal = equal[np.argsort(tied(equal), kind="stable")[:num_equal]]
    return [*below.tolist(), *equal.tolist()]
