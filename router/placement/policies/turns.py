"""Who was chosen when."""

from common.ids import WorkerId


class Turns:
    """Ranks workers by how long ago they were chosen."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[WorkerId, int] = {}

    def last_turn(self, worker_id: WorkerId) -> int:
        """Return the turn in which the worker was chosen last; 0: never."""
        return self._last.get(worker_id, 0)

    def take(self, *worker_ids: WorkerId) -> None:
        """Note that these have just been chosen, together."""
        self._now += 1
        for worker_id in worker_ids:
            self._last[worker_id] = self._now
