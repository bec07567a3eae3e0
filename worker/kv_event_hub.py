"""Fans one worker's KV events out to its watchers, coalesced for slow ones. Event loop only."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import Overloaded
from common.ids import BlockHash
from common.kv_events import KvEvents

MAX_PENDING_CHANGES = 1 << 20


class Watcher:
    """What one subscriber has not been sent yet: the last change of each hash.

    A subscriber that stops reading would gather every hash that was ever removed: it is given up at some point.
    """

    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}
        self._is_given_up = False
        self._woken = asyncio.Event()

    def add(self, events: KvEvents) -> None:
        """Merge newer events."""
        if self._is_given_up:
            return
        for block_hash in events.removed:
            self._changes[block_hash] = False
        for block_hash in events.stored:
            self._changes[block_hash] = True
        if len(self._changes) > MAX_PENDING_CHANGES:
            self._is_given_up = True
            self._changes = {}
        self._woken.set()

    async def next_changes(self) -> KvEvents:
        """Wait until something happened on the worker, then return the merged changes (none, when only load moved).

        Raises Overloaded when the subscriber was too slow: it has to subscribe again and begins with a snapshot.
        """
        await self._woken.wait()
        self._woken.clear()
        if self._is_given_up:
            raise Overloaded(f"more than {MAX_PENDING_CHANGES} changes were waiting to be read", retry_after_s=1.0)
        changes, self._changes = self._changes, {}
        return KvEvents(
            stored=tuple(h for h, stored in changes.items() if stored),
            removed=tuple(h for h, stored in changes.items() if not stored),
        )


class KvEventHub:
    """All watchers of one worker.

    A watcher is added first and takes its snapshot afterwards. Changes that the snapshot already contains are sent
    again, which is harmless: only the last change of each hash counts.
    """

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Subscribe for the duration of the block."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def publish(self, events: KvEvents) -> None:
        """Hand events (possibly none) to every watcher and wake it."""
        for watcher in self._watchers:
            watcher.add(events)
