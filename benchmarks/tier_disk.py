"""The disk tier's reads and writes of blocks, beside plain ones of the same size on the same file system.

    python -m benchmarks.tier_disk [--path /tmp] [--mib 512] [--rounds 3] [--json benchmarks/results/tier_disk.json]

Method: blocks of SmolLM2-135M (16 tokens in bfloat16: 368,640 bytes) by one thread; in each round every arm in turn.
`plain`: pwrite and pread; `plain, XXH3`: the same with a check of each block, as a tier that does not seal would have
one; `tier`: `Tiers.put` and `get`, sealed. `to cache` ends when the last write has returned, `to disk` when fdatasync
has. `from disk`: the kernel was told to drop the file's pages; `from cache`: the same once more. CPU is the thread's,
in the kernel too. `ready`: seconds to open a tier of so many GiB whose slots are all full.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from common.ids import BlockHash, HashRoot
from common.trust.sealing import root_tag
from kv_tiers import records
from kv_tiers.disk import Geometry
from kv_tiers.slots import Slot
from kv_tiers.tiers import Tiers, TierSettings

BLOCK_BYTES = 368_640
ROOT = HashRoot(b"r" * 32)
_SEAL_BYTES = 28


def hash_of(i: int) -> BlockHash:
    """Return the hash of block i."""
    return BlockHash(i.to_bytes(16, "little"))


def settings(path: Path, disk_bytes: int) -> TierSettings:
    """Return the settings of a disk tier."""
    return TierSettings(host_bytes=0, disk_bytes=disk_bytes, path=path, fingerprint="f", block_bytes=BLOCK_BYTES)


def measure(figures: Figures, case: str, arm: str, num_blocks: int, work: Callable[[], None]) -> None:
    """Time a loop over blocks."""
    cpu_s, begun_s = time.thread_time(), time.perf_counter()
    work()
    took_s, used_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
    num_bytes = num_blocks * BLOCK_BYTES
    values = {"GB/s": num_bytes / 1e9 / took_s, "CPU s per GiB": used_s / (num_bytes / 2**30)}
    figures.add("blocks", case, arm, **values)


def run_arm(
    figures: Figures, arm: str, file: Path, blocks: Sequence[bytes], num_blocks: int, put: Callable[[int, bytes], None]
) -> Callable[[Callable[[int], None]], None]:
    """Measure writing; returns a function that measures reading."""

    def write() -> None:
        for i in range(num_blocks):
            put(i, blocks[i % len(blocks)])

    begun_s = time.perf_counter()
    measure(figures, "write, to cache", arm, num_blocks, write)
    with file.open("r+b") as opened:
        os.fdatasync(opened.fileno())
    took_s = time.perf_counter() - begun_s
    figures.add("blocks", "write, to disk", arm, **{"GB/s": num_blocks * BLOCK_BYTES / 1e9 / took_s})

    def read(get: Callable[[int], None]) -> None:
        def read_all() -> None:
            for i in range(num_blocks):
                get(i)

        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for case in ("read, from disk", "read, from cache"):
            measure(figures, case, arm, num_blocks, read_all)

    return read


def run_plain(figures: Figures, folder: Path, blocks: Sequence[bytes], num_blocks: int, *, has_check: bool) -> None:
    """Measure the system's own calls."""
    file = folder / "plain"
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, num_blocks * BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)

    def put(i: int, data: bytes) -> None:
        if has_check:
            xxhash.xxh3_128_digest(data)
        os.pwrite(fd, data, i * BLOCK_BYTES)

    def get(i: int) -> None:
        os.preadv(fd, [buffer], i * BLOCK_BYTES)
        if has_check:
            xxhash.xxh3_128_digest(buffer)

    run_arm(figures, "plain, XXH3" if has_check else "plain", file, blocks, num_blocks, put)(get)
    os.close(fd)
    file.unlink()


def run_tier(figures: Figures, folder: Path, blocks: Sequence[bytes], num_blocks: int) -> None:
    """Measure the tier."""
    tiers = Tiers.open(settings(folder, num_blocks * (BLOCK_BYTES + records.RECORD_BYTES)))
    file = next(folder.glob("*/0/blocks"))

    def get(i: int) -> None:
        assert tiers.get(hash_of(i), ROOT) == blocks[i % len(blocks)]

    def put(i: int, data: bytes) -> None:
        tiers.put(hash_of(i), ROOT, memoryview(data))

    run_arm(figures, "tier", file, blocks, num_blocks, put)(get)
    tiers.close()


def run_ready(figures: Figures, folder: Path, gib: int) -> None:
    """Measure opening a full tier: its index has a record in each slot, its blocks are a hole."""
    wanted = settings(folder, gib << 30)
    Tiers.open(wanted).close()
    geometry = Geometry.of(disk_bytes=wanted.disk_bytes, block_bytes=BLOCK_BYTES, fingerprint=wanted.fingerprint)
    tag, seal = root_tag(ROOT), bytes(_SEAL_BYTES)
    slots = (Slot(number=i, block_hash=hash_of(i), root_tag=tag, used=i) for i in range(geometry.num_slots))
    packed = b"".join(records.pack(slot, seal, records.State.WHOLE, key=geometry.key) for slot in slots)
    next(folder.glob("*/0/index")).write_bytes(packed)
    cpu_s, begun_s = time.thread_time(), time.perf_counter()
    tiers = Tiers.open(wanted)
    took_s, used_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
    assert len(tiers) == geometry.num_slots
    tiers.close()
    figures.add("ready", f"{gib} GiB, {geometry.num_slots:,} blocks", "tier", s=took_s, CPU_s=used_s)


def main() -> None:
    """Run all arms in turn."""
    parser = command_line("tier_disk", __doc__, rounds=3)
    parser.add_argument("--path", type=Path, help="folder on the file system to measure")
    parser.add_argument("--mib", type=int, default=512, help="bytes that each arm writes and reads")
    parser.add_argument("--ready-gib", type=int, default=100, help="size of the tier that is opened")
    args = parser.parse_args()
    num_blocks = max(1, (args.mib << 20) // BLOCK_BYTES)
    blocks = [os.urandom(BLOCK_BYTES) for _ in range(min(64, num_blocks))]
    figures = Figures()
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.path) as folder:
            run_plain(figures, Path(folder), blocks, num_blocks, has_check=False)
            run_plain(figures, Path(folder), blocks, num_blocks, has_check=True)
            run_tier(figures, Path(folder) / "blocks", blocks, num_blocks)
            run_ready(figures, Path(folder) / "ready", args.ready_gib)
    for table in figures.tables(base="plain"):
        terminal().print(table)
    write_figures(args.json, figures, method="benchmarks/tier_disk.py", block_bytes=BLOCK_BYTES)


if __name__ == "__main__":
    main()
