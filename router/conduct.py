"""How each life of a worker has done lately: attempts that ended, and those that it failed.

Both counts halve every minute, so that they tell of the last minutes without a list of them. The controller adds up
the counts of all routers, and puts a worker that fails more than its peers on trial (cluster/health/).
"""

from dataclasses import dataclass

from common.errors import TransferError, WorkerError

HALF_LIFE_S = 60.0


def is_failure(error: BaseException) -> bool:
    """Return whether an error that ended an attempt counts against its worker; refusals and cancellations do not."""
    return isinstance(error, WorkerError | TransferError)


@dataclass(slots=True)
class Conduct:
    """Decaying counts of one life of a worker."""

    _num_attempts: float = 0.0
    _num_failed: float = 0.0
    _noted_s: float = 0.0

    def note(self, *, now_s: float, num_failed: int = 0) -> None:
        """Count an attempt that ended now; `num_failed` is 1 if the worker failed it."""
        self._num_attempts, self._num_failed = self.counts(now_s)
        self._num_attempts += 1
        self._num_failed += num_failed
        self._noted_s = now_s

    def counts(self, now_s: float) -> tuple[float, float]:
        """Return attempts and failed ones, as of now."""
        decay = 0.5 ** (max(0.0, now_s - self._noted_s) / HALF_LIFE_S)
        return self._num_attempts * decay, self._num_failed * decay
