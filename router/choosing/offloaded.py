"""What a waiting request would have read from tiers, and where: at the worker that will most probably be used."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from common.ids import WorkerId
from router.fleet.index import PrefixIndex
from router.fleet.member import Member
from router.placement.plans import PlacementRequest

MAX_HOLDERS = 4
"""Workers with most blocks of a request that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBlocks:
    """Leading blocks of a request that a worker has, the last ones in its tiers only."""

    worker_id: WorkerId
    num_blocks: int
    num_offloaded: int
    read_s: float
    """Predicted time to read the offloaded ones."""


def find_offloaded(
    index: PrefixIndex, members: Mapping[WorkerId, Member], request: PlacementRequest, *, awaited: WorkerId | None
) -> OffloadedBlocks | None:
    """Return what should be read for a request that waits, perhaps for the `awaited` worker; None: nothing.

    That worker is asked, or else the one that holds most. It has more than any other one has in pages, so that it
    computes the prompt or is pulled from, and it reads its blocks faster than it would compute them.
    """
    if not index.has_tiers:
        return None
    matches = index.match(request.hashes, num_usable=request.num_usable_blocks)
    holders = [worker_id for _num_blocks, worker_id in islice(matches.longest_holders(), MAX_HOLDERS)]
    if awaited is not None and awaited in matches:
        holders = [awaited, *(worker_id for worker_id in holders if worker_id != awaited)]
    most_in_pages = max((matches.num_in_pages(worker_id) for worker_id in holders), default=0)
    for worker_id in holders:
        member = members.get(worker_id)
        num_blocks = min(matches.count_present(worker_id), request.num_usable_blocks)
        if num_blocks <= most_in_pages or member is None or member.facts is None or not member.may_begin:
            continue
        num_in_pages = matches.num_in_pages(worker_id)
        num_offloaded, size = num_blocks - num_in_pages, request.block_size
        read_s = member.timing.tier_read_s(num_offloaded * member.facts.block_bytes)
        if read_s < member.timing.prefill_s(num_offloaded * size, num_in_pages * size):
            return OffloadedBlocks(
                worker_id=worker_id, num_blocks=num_blocks, num_offloaded=num_offloaded, read_s=read_s
            )
    return None
