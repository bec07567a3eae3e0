"""What routers are told of a worker's blocks, whichever of pages and tiers gets or loses them first."""

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import BlockHashes
from common.ids import BlockHash
from common.kv_events import KvEvents
from worker.held_blocks import HeldBlocks

HASHES = [BlockHash(bytes([n]) * 16) for n in range(4)]


def packed(blocks: set[BlockHash]) -> BlockHashes:
    return BlockHashes.of(sorted(blocks))


@given(st.lists(st.tuples(st.sampled_from(["page", "tier"]), st.dictionaries(st.sampled_from(HASHES), st.booleans()))))
def test_a_follower_of_the_events_knows_what_is_held_and_where(
    changes: list[tuple[str, dict[BlockHash, bool]]],
) -> None:
    held, pages, tiers = HeldBlocks(), set[BlockHash](), set[BlockHash]()
    known, offloaded = set[BlockHash](), set[BlockHash]()
    for place, change in changes:
        here = pages if place == "page" else tiers
        news = {block: is_in for block, is_in in change.items() if is_in != (block in here)}
        added, gone = {block for block, is_in in news.items() if is_in}, {b for b, is_in in news.items() if not is_in}
        here |= added
        here -= gone
        if place == "page":
            events = held.of_pages(KvEvents(stored=packed(added), removed=packed(gone)))
        else:
            events = held.of_tiers(news)
        known -= set(events.removed)
        offloaded -= set(events.removed)
        known |= set(events.stored)
        offloaded -= set(events.stored)
        offloaded |= set(events.offloaded)
        assert (known, offloaded) == (pages | tiers, tiers - pages)
        snapshot = held.snapshot(KvEvents(stored=packed(pages), is_snapshot=True))
        assert (set(snapshot.stored), set(snapshot.offloaded)) == (known, offloaded)
