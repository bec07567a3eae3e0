"""`longest_prefix`: the reference for hit rate, without any load.

The worker with the longest match of more than one block; without such a match, and among equals, the one chosen longest
ago. A match of a single block is noise: prompts of one chat template all begin alike, and a rule that follows it sends
everything to one worker.
"""

from collections.abc import Sequence

from router.placement.plans import RouteRequest, WorkerLoad
from router.placement.policies.pooled import Score, Selector
from router.placement.policies.turns import Turns

MAX_NOISE_BLOCKS = 1


class LongestPrefix(Selector):
    """Longest match, else in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns()

    def score(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> list[Score]:
        """By match, then by turn."""
        return [self._score(request, worker) for worker in workers]

    def note(self, request: RouteRequest, worker: WorkerLoad) -> None:
        """Its turn is over."""
        self._turns.take(worker.worker_id)

    def _score(self, request: RouteRequest, worker: WorkerLoad) -> Score:
        match = request.cached_blocks.get(worker.worker_id, 0)
        counted = float(match) if match > MAX_NOISE_BLOCKS else 0.0
        turn = self._turns.last_turn(worker.worker_id)
        return Score(worker=worker, cost=-counted, then=(turn,), terms={"matched_blocks": float(match)})
