"""Handoffs on the serving side: the right of one puller to fetch one prompt's KV, under a lease.

    EXPECTED ──prefill began──▶ FILLING ──last token computed──▶ COMPLETE ──puller's ack──▶ RELEASED
        └──────────────┴──────────────────────┴──── abort by either side, or expiry ────▶ ABORTED

Either side may come first: the decode worker opens its fetch as soon as its pages are reserved, usually before the
prefill request has arrived. Both ends learn of an abort at once; the time to live covers crashes. Entering
RELEASED or ABORTED runs `on_end` exactly once, which unpins the pages. Cached blocks that a puller asks for by their
hashes are a handoff that is COMPLETE from the start and has its puller (`grant`).

An abort before either side has come is remembered for one time to live, so that the side is refused when it comes.
"""

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from common.block_hash import PrefixTokens
from common.clock import Clock
from common.errors import HandoffGone, InvalidRequest, KvrelayError, Overloaded
from common.ids import BlockHash, BlockId, HandoffId, mint_handoff_id
from engine.window_ids import NO_WINDOWS, WindowIds

logger = logging.getLogger(__name__)

MAX_HANDOFFS = 4096
"""Limit of open handoffs, and of aborts that are remembered."""


class HandoffState(enum.Enum):
    """State of a handoff."""

    EXPECTED = "expected"
    FILLING = "filling"
    COMPLETE = "complete"
    RELEASED = "released"
    ABORTED = "aborted"


_NEXT: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.EXPECTED: frozenset({HandoffState.FILLING, HandoffState.ABORTED}),
    HandoffState.FILLING: frozenset({HandoffState.COMPLETE, HandoffState.ABORTED}),
    HandoffState.COMPLETE: frozenset({HandoffState.RELEASED, HandoffState.ABORTED}),
    HandoffState.RELEASED: frozenset(),
    HandoffState.ABORTED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first generated token of a sample."""

    sample_index: int
    token_id: int
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffManifest:
    """Requirements that the puller verifies before it may decode."""

    num_tokens: int
    num_blocks: int
    last_block_hash: BlockHash | None
    first_tokens: tuple[FirstToken, ...]
    prefix: PrefixTokens | None = None
    """Tokens of cached blocks, where the source's engine keeps them."""
    offloaded_wait_s: float = 0.0
    """Time for which the source waited for blocks out of its tiers."""


@dataclass(slots=True, eq=False)
class Handoff:
    """One handoff. Event loop only; changed by `HandoffTable` alone."""

    handoff_id: HandoffId
    block_size: int
    idle_since_s: float
    """Start of the wait for the side that is missing; the lease counts from here."""
    state: HandoffState = HandoffState.EXPECTED
    block_table: tuple[BlockId, ...] = ()
    windows: WindowIds = NO_WINDOWS
    """Window pages at the end of the ready tokens."""
    num_ready_tokens: int = 0
    manifest: HandoffManifest | None = None
    completed_s: float | None = None
    error: KvrelayError | None = None
    has_puller: bool = False
    on_end: Callable[[], None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether the handoff has ended, and pins nothing."""
        return not _NEXT[self.state]

    @property
    def num_ready_blocks(self) -> int:
        """Blocks that are final: full ones, and the tail once the prompt is complete."""
        if self.manifest is not None:
            return self.manifest.num_blocks
        return self.num_ready_tokens // self.block_size

    async def changed(self) -> None:
        """Wait for the next change of anything here."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    def raise_if_aborted(self) -> None:
        """Raise the reason once the handoff is aborted."""
        if self.state is HandoffState.ABORTED:
            assert self.error is not None
            raise self.error


class HandoffTable:
    """All handoffs of one serving worker. Event loop only."""

    def __init__(self, *, block_size: int, lease_ttl_s: float, clock: Clock) -> None:
        self._block_size = block_size
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._handoffs: dict[HandoffId, Handoff] = {}
        self._aborted: dict[HandoffId, tuple[float, KvrelayError]] = {}
        """Handoffs that were aborted before both sides had come: time and reason, oldest first."""
        self.num_expired = 0

    @property
    def num_leases(self) -> int:
        """Handoffs that are expected or pin pages."""
        return len(self._handoffs)

    async def until_empty(self) -> None:
        """Wait until there are no handoffs."""
        while self._handoffs:
            await next(iter(self._handoffs.values())).changed()

    def begin(self, handoff_id: HandoffId, on_end: Callable[[], None]) -> Handoff:
        """Enter the prefill side; `on_end` runs once when the handoff ends.

        Raises InvalidRequest when it has begun before, and the reason of the abort when the puller has left.
        """
        handoff = self._get_or_expect(handoff_id)
        if handoff.state is not HandoffState.EXPECTED:
            raise InvalidRequest(f"handoff {handoff_id} has begun already", field="handoff_id")
        handoff.on_end = on_end
        self._advance(handoff, HandoffState.FILLING)
        return handoff

    def attach_puller(self, handoff_id: HandoffId) -> Handoff:
        """Enter the puller. Raises HandoffGone when there is another one."""
        handoff = self._get_or_expect(handoff_id)
        if handoff.has_puller:
            raise HandoffGone(f"handoff {handoff_id} has another puller already")
        handoff.has_puller = True
        handoff.idle_since_s = self._clock.monotonic()
        return handoff

    def grant(
        self,
        block_table: tuple[BlockId, ...],
        manifest: HandoffManifest,
        on_end: Callable[[], None],
        windows: WindowIds = NO_WINDOWS,
    ) -> Handoff:
        """Return a complete handoff of pinned cached blocks. Raises Overloaded; the caller then unpins them."""
        handoff = self.attach_puller(mint_handoff_id())
        handoff.on_end = on_end
        self._advance(handoff, HandoffState.FILLING)
        self.progress(handoff, block_table, manifest.num_tokens, windows)
        self.complete(handoff, manifest)
        return handoff

    def progress(
        self,
        handoff: Handoff,
        block_table: tuple[BlockId, ...],
        num_tokens: int,
        windows: WindowIds = NO_WINDOWS,
    ) -> None:
        """Record that the KV of the first `num_tokens` tokens is in the pages."""
        if not handoff.is_over:
            handoff.block_table, handoff.windows = block_table, windows
            handoff.num_ready_tokens = num_tokens
            handoff.notify()

    def complete(self, handoff: Handoff, manifest: HandoffManifest) -> None:
        """Record that the prompt is computed and its first tokens are known. A no-op after an abort."""
        if not handoff.is_over:
            handoff.manifest = manifest
            handoff.completed_s = handoff.idle_since_s = self._clock.monotonic()
            self._advance(handoff, HandoffState.COMPLETE)

    def age_s(self, handoff: Handoff) -> float:
        """Return the seconds since a handoff was completed."""
        assert handoff.completed_s is not None, handoff.state
        return self._clock.monotonic() - handoff.completed_s

    def release(self, handoff: Handoff) -> None:
        """End a handoff whose puller has everything."""
        self._end(handoff, HandoffState.RELEASED)

    def abort(self, handoff: Handoff, error: KvrelayError) -> None:
        """End a handoff because one side gave up; the other side is notified at once. A no-op when it has ended."""
        if not handoff.is_over:
            if handoff.state is HandoffState.EXPECTED or not handoff.has_puller:  # the missing side may yet come
                self._remember(handoff.handoff_id, error)
            handoff.error = error
            self._end(handoff, HandoffState.ABORTED)

    def sweep(self) -> None:
        """Abort every handoff that has waited for one of its sides longer than the time to live.

        A prefill that computes is not waiting, whether or not its puller has come.
        """
        now_s = self._clock.monotonic()
        for handoff in list(self._handoffs.values()):
            missing = "puller" if not handoff.has_puller else "prefill request"
            is_waiting = handoff.state is HandoffState.EXPECTED or (
                handoff.state is HandoffState.COMPLETE and not handoff.has_puller
            )
            if is_waiting and now_s - handoff.idle_since_s > self._lease_ttl_s:
                self.num_expired += 1
                logger.warning("handoff %s expired: no %s", handoff.handoff_id, missing)
                self.abort(handoff, HandoffGone(f"no {missing} came within {self._lease_ttl_s} s"))
        while self._aborted and now_s - next(iter(self._aborted.values()))[0] > self._lease_ttl_s:
            del self._aborted[next(iter(self._aborted))]

    def _remember(self, handoff_id: HandoffId, error: KvrelayError) -> None:
        if len(self._aborted) >= MAX_HANDOFFS:
            del self._aborted[next(iter(self._aborted))]
        self._aborted[handoff_id] = (self._clock.monotonic(), error)

    def _get_or_expect(self, handoff_id: HandoffId) -> Handoff:
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            if (aborted := self._aborted.get(handoff_id)) is not None:
                raise aborted[1]
            if len(self._handoffs) >= MAX_HANDOFFS:
                raise Overloaded(f"{MAX_HANDOFFS} handoffs are open", retry_after_s=1.0)
            handoff = Handoff(handoff_id, self._block_size, self._clock.monotonic())
            self._handoffs[handoff_id] = handoff
        return handoff

    def _advance(self, handoff: Handoff, to: HandoffState) -> None:
        assert to in _NEXT[handoff.state], f"handoff {handoff.handoff_id}: {handoff.state.value} -> {to.value}"
        handoff.state = to
        handoff.notify()

    def _end(self, handoff: Handoff, to: HandoffState) -> None:
        if handoff.is_over:
            return
        self._advance(handoff, to)
        del self._handoffs[handoff.handoff_id]
        if handoff.on_end is not None:
            handoff.on_end()
