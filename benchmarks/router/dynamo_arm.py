"""ai-dynamo-runtime's radix tree, under its own interpreter: standard library and the peer only.

python dynamo_arm.py NUM_WORKERS NUM_BLOCKS TOTAL_BLOCKS      prints one JSON object of figures
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Fill the tree as the benchmark fills our index, then look prompts up."""
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    num_workers, num_blocks, total_blocks = map(int, sys.argv[1:])
    rng = random.Random(1)
    tree: Any = RadixTree()
    shared = [rng.getrandbits(63) for _ in range(num_blocks // 8)]
    prompts: list[list[int]] = []
    event_ids = iter(range(1 << 60))
    stored, stored_s = 0, 0.0

    def store(worker: int, hashes: list[int]) -> float:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in hashes]
        event = {"event_id": next(event_ids), "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        raw = json.dumps(event).encode()
        started_s = time.perf_counter()
        tree.apply_event(worker, raw)
        return time.perf_counter() - started_s

    for _ in range(max(4, total_blocks // num_blocks)):
        prompt = shared + [rng.getrandbits(63) for _ in range(num_blocks - len(shared))]
        prompts.append(prompt)
        stored_s += store(rng.randrange(num_workers), prompt)
        stored += len(prompt)
        for worker in rng.sample(range(num_workers), 3):
            store(worker, prompt[: num_blocks // 2])
    for worker in range(num_workers):
        store(worker, shared)
    found = tree.find_matches(prompts[0])
    assert max(found.scores.values()) == num_blocks, "the tree does not know what it was given"
    figures = {"match_us": _time_us(lambda: tree.find_matches(rng.choice(prompts)), 500)}
    figures["match_all_us"] = _time_us(lambda: dict(tree.find_matches(rng.choice(prompts)).scores), 300)
    figures["million_stored_per_s"] = stored / stored_s / 1e6
    sys.stdout.write(json.dumps(figures) + "\n")


def _time_us(work: Callable[[], object], num_calls: int) -> float:
    samples = []
    for _ in range(num_calls):
        started_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started_s)
    return sorted(samples)[num_calls // 2] * 1e6


if __name__ == "__main__":
    main()
