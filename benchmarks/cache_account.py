"""Usage of 100,000 random requests with marks, beside a reference account.

    python -m benchmarks.cache_account [requests] [seed]

Four workers with 96 pages each, three routers, four tenants of which two share their cache; see
`tests/router/cache_account.py`, whose test asks a small part of it. Ends at the first request that was told something
else than the account says, and prints what was read, written, pinned, refused and evicted otherwise.
"""

import sys
from collections import Counter

from tests.router.cache_account import Cluster


def main(num_requests: int = 100_000, seed: int = 1) -> None:
    """Ask, compare and print the sums."""
    cluster, sums = Cluster(num_workers=4, num_routers=3, seed=seed), Counter[str]()
    for number, (told, expected) in enumerate(cluster.served(num_requests)):
        if told != expected:
            sys.exit(f"request {number} was told {told}; the account says {expected}")
        num_read, writes, num_pinned, num_refused = told
        sums += Counter(read=num_read, pinned=num_pinned, refused=num_refused)
        sums.update({f"written for {ttl_s:g} s": num_tokens for ttl_s, num_tokens in writes})
    print(f"{num_requests} requests, each told what the account says; tokens:")
    for name, count in sorted(sums.items()):
        print(f"  {name}: {count}")
    print(f"  blocks evicted: {sum(sum(core.pool.lives) for core, _ledger in cluster.workers)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
