"""Resident memory of a filled index, in a process that has nothing else.

`python -m benchmarks.router.memory NUM_WORKERS BATCH NUM_BLOCKS` prints the bytes for each block.
"""

import gc
import random
import sys

import psutil

from common.block_hash import BlockHashes
from common.ids import WorkerId
from common.kv_events import KvEvents, decode_events, encode_events
from router.fleet.index import PrefixIndex


def random_hashes(rng: random.Random, num_blocks: int) -> BlockHashes:
    """Return hashes that nothing else has."""
    return BlockHashes(rng.randbytes(16 * num_blocks))


def _print_memory(num_workers: int, batch: int, num_blocks: int) -> None:
    rng = random.Random(1)
    index, process = PrefixIndex(), psutil.Process()
    workers = [WorkerId(f"worker-{number}") for number in range(num_workers)]
    gc.collect()
    before = process.memory_info().rss
    for number in range(num_blocks // batch):
        part = encode_events(KvEvents(stored=random_hashes(rng, batch)))
        for holder in (number, 7 * number + 1):  # two workers hold each block
            index.apply(workers[holder % num_workers], decode_events(part))
    gc.collect()
    print((process.memory_info().rss - before) / index.num_blocks)


if __name__ == "__main__":
    _print_memory(*map(int, sys.argv[1:]))
