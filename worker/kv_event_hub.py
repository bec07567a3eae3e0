"""Fans one worker's KV events out to its watchers, merged for slow ones. Event loop only."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.errors import KvrelayError, Overloaded, WorkerLost
from common.ids import BlockHash, RequestId
from common.kv_events import NO_EVENTS, KvEvents

MAX_PENDING_CHANGES = 1 << 20
MAX_PENDING_REQUESTS = 1 << 16


class Watcher:
    """Changes that have not been sent to one subscriber yet: one batch as it came, or the last change of each hash.

    Most batches are sent before the next one comes. They may be as large as the pages, and are passed on as they are.
    The subscription ends when there are too many: a subscriber that stops reading would collect every removed hash.
    """

    def __init__(self) -> None:
        self._batch = NO_EVENTS
        self._changes: dict[BlockHash, bool] = {}
        self._has_page: dict[BlockHash, bool] = {}
        """Changes of window pages since a block was stored."""
        self._offloaded: dict[BlockHash, bool] = {}
        """Blocks that have been offloaded since they were stored."""
        self._accepted: deque[RequestId] = deque(maxlen=MAX_PENDING_REQUESTS)
        self._end: KvrelayError | None = None
        self._woken = asyncio.Event()

    def add(self, events: KvEvents, accepted: Sequence[RequestId] = ()) -> None:
        """Merge newer events; the requests `accepted` have entered the engine since."""
        if self._end is not None:
            return
        self._accepted.extend(accepted)
        self._woken.set()
        if not events:
            return
        if not self._batch and not self._num_merged:
            self._batch = events
        else:
            batch, self._batch = self._batch, NO_EVENTS
            self._merge(batch)
            self._merge(events)
        if self._batch.num_changes + self._num_merged > MAX_PENDING_CHANGES:
            self.end(Overloaded(f"more than {MAX_PENDING_CHANGES} changes wait to be read", retry_after_s=1.0))

    @property
    def _num_merged(self) -> int:
        return len(self._changes) + len(self._has_page) + len(self._offloaded)

    def _merge(self, events: KvEvents) -> None:
        for block_hash in events.removed:
            self._changes[block_hash] = False
        for block_hash in events.stored:
            self._changes[block_hash] = True
        for marks in (self._has_page, self._offloaded):
            if marks:
                for block_hash in (*events.removed, *events.stored):
                    marks.pop(block_hash, None)
        self._has_page |= dict.fromkeys(events.paged, True) | dict.fromkeys(events.unpaged, False)
        self._offloaded |= dict.fromkeys(events.offloaded, True)

    def end(self, error: KvrelayError) -> None:
        """Make the subscriber's next call raise `error`."""
        self._end = error
        self._batch = NO_EVENTS
        self._changes, self._has_page, self._offloaded = {}, {}, {}
        self._woken.set()

    async def next_changes(self, *, within_s: float | None = None) -> KvEvents:
        """Wait for the next event, then return the merged changes: none when only the load has changed.

        Returns without any when nothing happens within the given time.

        Raises Overloaded when the subscriber was too slow and must subscribe again, starting with a snapshot, and
        WorkerLost when the worker is stopping.
        """
        if not self._woken.is_set():
            # A timeout would cancel the wait, several times a second for each idle worker and router.
            timer = None if within_s is None else asyncio.get_running_loop().call_later(within_s, self._woken.set)
            try:
                await self._woken.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        if self._end is not None:
            raise self._end
        self._woken.clear()
        batch, self._batch = self._batch, NO_EVENTS
        if batch:
            return batch
        changes, self._changes = self._changes, {}
        has_page, self._has_page = self._has_page, {}
        offloaded, self._offloaded = self._offloaded, {}
        return KvEvents.of_changes(changes, has_page, offloaded)

    def take_accepted(self) -> tuple[RequestId, ...]:
        """Return the requests that have entered the engine since the last call."""
        accepted = tuple(self._accepted)
        self._accepted.clear()
        return accepted


class KvEventHub:
    """All watchers of one worker.

    A watcher is added before it takes its snapshot. Changes in the snapshot are sent again, which is harmless: only the
    last change of each hash counts.
    """

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}  # in order, so that a simulation can be repeated
        self._unwatched = asyncio.Event()
        self._unwatched.set()

    def close(self) -> None:
        """End every subscription: open streams would delay the server's stop."""
        self.end(WorkerLost("the worker is stopping"))

    def end(self, why: KvrelayError) -> None:
        """End every subscription with a reason."""
        for watcher in self._watchers:
            watcher.end(why)

    async def until_unwatched(self) -> None:
        """Wait until there are no subscribers."""
        await self._unwatched.wait()

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Subscribe for the duration of the block."""
        watcher = Watcher()
        self._watchers[watcher] = None
        self._unwatched.clear()
        try:
            yield watcher
        finally:
            self._watchers.pop(watcher, None)
            if not self._watchers:
                self._unwatched.set()

    def publish(self, events: KvEvents, accepted: Sequence[RequestId] = ()) -> None:
        """Hand events (possibly none) and accepted requests to every watcher."""
        for watcher in self._watchers:
            watcher.add(events, accepted)
