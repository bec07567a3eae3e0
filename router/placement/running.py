"""An answer while its attempt runs: what it holds on its decode worker, and how it is taken from there."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

STAY_S = 0.25
"""How long an answer that was set back once stays when it runs again; each further time, twice as long."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunningAnswer:
    """One attempt at an answer. Event loop only."""

    tenant: str
    number: int
    """Position of its request in the order of arrival."""
    num_places: int
    """Sequences that it may have in the batch."""
    began_s: float
    """Time at which the attempt began."""
    num_set_back: int
    """Times that the answer was set back before."""
    count_blocks: Callable[[], int]
    """Returns the pages that it fills now."""
    running: asyncio.Timeout
    """Ends the attempt."""
    is_set_back: bool = False

    def may_go(self, now_s: float) -> bool:
        """Return whether it may be set back: it has stayed long enough since the last time."""
        stay_s = STAY_S * 2.0 ** (self.num_set_back - 1) if self.num_set_back else 0.0
        return not self.is_set_back and now_s - self.began_s >= stay_s

    def set_back(self) -> None:
        """End the attempt at once, wherever it is; the answer goes on later with the same tokens."""
        self.is_set_back = True
        self.running.reschedule(asyncio.get_running_loop().time())
