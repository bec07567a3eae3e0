"""The latest decisions, and what came of them.

A decision is logged when its plan is booked. Whoever runs the plan notes in it what the workers really found and how
long they really took; when the attempt ends, listeners compare that with what was predicted. The log keeps a bounded
number: a plan, and the few scores and loads that explain it, each.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import Cancelled
from common.ids import RequestId
from router.placement.plans import Plan

CAPACITY = 1000
COMPLETED = "completed"


@dataclass(slots=True, eq=False, kw_only=True)
class Decision:
    """One booked plan and its outcome; what is None is not known (yet). Event loop only."""

    request_id: RequestId
    num_tokens: int
    """That had to be in the KV cache."""
    plan: Plan
    decided_s: float
    """On the router's clock."""
    decision_s: float = 0.0
    """How long it took."""
    tenant: str = ""
    """Whose request it is: nobody else may see it."""
    attempt: int = 0
    num_hashed_blocks: int = 0
    """Full blocks that caches may hold; 0 for a request that no cache serves."""
    num_cached_tokens: int | None = None
    """Found in the cache, pulled ones included."""
    ttft_s: float | None = None
    """From the choice to the first token."""
    mean_itl_s: float | None = None
    """Between the tokens of the first sample in this attempt."""
    ended: str = ""
    """Empty while the attempt runs; then "completed", "moved" when its worker was about to go, or an error's class."""


class DecisionLog:
    """A ring of decisions. Event loop only."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._decisions: deque[Decision] = deque(maxlen=capacity)
        self._listeners: list[Callable[[Decision], None]] = []

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """Log a decision; the oldest one gives way."""
        self._decisions.append(decision)

    def subscribe(self, listener: Callable[[Decision], None]) -> None:
        """Call `listener` with every decision whose attempt has ended."""
        self._listeners.append(listener)

    @contextmanager
    def following(self, decision: Decision, *, tenant: str, attempt: int) -> Iterator[None]:
        """Run the attempt inside: how that ends is how the decision ends, unless the attempt says so itself."""
        decision.tenant, decision.attempt = tenant, attempt
        ended = COMPLETED
        try:
            yield
        except asyncio.CancelledError:
            ended = Cancelled.__name__
            raise
        except BaseException as error:
            ended = type(error).__name__
            raise
        finally:
            decision.ended = decision.ended or ended
            for listener in self._listeners:
                listener(decision)

    def latest(self, *, tenant: str, limit: int, request_id: RequestId | None = None) -> list[Decision]:
        """Return the tenant's latest decisions, of one request or of all, newest first."""
        found: list[Decision] = []
        for decision in reversed(self._decisions):
            if len(found) == limit:
                break
            if decision.tenant == tenant and request_id in (None, decision.request_id):
                found.append(decision)
        return found
