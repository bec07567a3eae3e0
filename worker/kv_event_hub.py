"""Fans one worker's KV events out to its watchers, coalesced for slow ones. Event loop only."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.block_hash import BlockHashes
from common.errors import KvrelayError, Overloaded, WorkerLost
from common.ids import BlockHash, RequestId
from common.kv_events import KvEvents

MAX_PENDING_CHANGES = 1 << 20
MAX_PENDING_REQUESTS = 1 << 16


class Watcher:
    """What one subscriber has not been sent yet: the last change of each hash.

    A subscriber that stops reading would gather every hash that was ever removed: it is given up at some point.
    """

    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}
        self._accepted: deque[RequestId] = deque(maxlen=MAX_PENDING_REQUESTS)
        self._end: KvrelayError | None = None
        self._woken = asyncio.Event()

    def add(self, events: KvEvents, accepted: Sequence[RequestId] = ()) -> None:
        """Merge newer events; `accepted` have entered the engine meanwhile."""
        if self._end is not None:
            return
        self._accepted.extend(accepted)
        for block_hash in events.removed:
            self._changes[block_hash] = False
        for block_hash in events.stored:
            self._changes[block_hash] = True
        self._woken.set()
        if len(self._changes) > MAX_PENDING_CHANGES:
            self.end(Overloaded(f"more than {MAX_PENDING_CHANGES} changes wait to be read", retry_after_s=1.0))

    def end(self, error: KvrelayError) -> None:
        """Let the subscriber's next call raise `error`."""
        self._end = error
        self._changes = {}
        self._woken.set()

    async def next_changes(self) -> KvEvents:
        """Wait until something happened on the worker, then return the merged changes (none, when only load moved).

        Raises Overloaded when the subscriber was too slow (it has to subscribe again and begins with a snapshot), and
        WorkerLost when the worker is stopping.
        """
        await self._woken.wait()
        if self._end is not None:
            raise self._end
        self._woken.clear()
        changes, self._changes = self._changes, {}
        return KvEvents(
            stored=BlockHashes.of(h for h, stored in changes.items() if stored),
            removed=BlockHashes.of(h for h, stored in changes.items() if not stored),
        )

    def take_accepted(self) -> tuple[RequestId, ...]:
        """Return the requests that have entered the engine and were not told yet."""
        accepted = tuple(self._accepted)
        self._accepted.clear()
        return accepted


class KvEventHub:
    """All watchers of one worker.

    A watcher is added first and takes its snapshot afterwards. Changes that the snapshot already contains are sent
    again, which is harmless: only the last change of each hash counts.
    """

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}  # in order, so that a simulation can be repeated
        self._unwatched = asyncio.Event()
        self._unwatched.set()

    def close(self) -> None:
        """End every subscription: the worker is stopping, and an open stream would hold up its server."""
        self.end(WorkerLost("the worker is stopping"))

    def end(self, why: KvrelayError) -> None:
        """End every subscription that there is."""
        for watcher in self._watchers:
            watcher.end(why)

    async def until_unwatched(self) -> None:
        """Wait until nobody subscribes."""
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
        """Hand events (possibly none) and accepted requests to every watcher and wake it."""
        for watcher in self._watchers:
            watcher.add(events, accepted)
