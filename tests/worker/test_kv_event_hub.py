"""KvEventHub: watchers get the last change of each hash, and one that stops reading costs bounded memory."""

import pytest

from common.block_hash import BlockHashes
from common.errors import Overloaded
from common.ids import BlockHash
from common.kv_events import KvEvents
from worker.kv_event_hub import KvEventHub

A, B = BlockHash(b"a" * 16), BlockHash(b"b" * 16)


async def test_watcher_merges_changes_to_the_last_one_of_each_hash() -> None:
    hub = KvEventHub()
    with hub.watch() as watcher:
        hub.publish(KvEvents(stored=BlockHashes.of((A, B))))
        hub.publish(KvEvents(removed=BlockHashes.of((A,))))
        assert await watcher.next_changes() == KvEvents(stored=BlockHashes.of((B,)), removed=BlockHashes.of((A,)))
        hub.publish(KvEvents())
        assert await watcher.next_changes() == KvEvents()


async def test_subscription_of_a_slow_watcher_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.kv_event_hub.MAX_PENDING_CHANGES", 1)
    hub = KvEventHub()
    with hub.watch() as slow, hub.watch() as fast:
        hub.publish(KvEvents(stored=BlockHashes.of((A,))))
        assert await fast.next_changes() == KvEvents(stored=BlockHashes.of((A,)))
        hub.publish(KvEvents(stored=BlockHashes.of((B,)), removed=BlockHashes.of((A,))))
        hub.publish(KvEvents(stored=BlockHashes.of((A,))))
        with pytest.raises(Overloaded):
            await slow.next_changes()
