"""A million faults of the disk tier, which must never return wrong bytes and never hang.

    python -m benchmarks.tier_faults [--faults 1000000] [--seed 1] [--json benchmarks/results/tier_faults.json]

Method: a disk tier of small blocks in a temporary folder; a block's bytes follow from its hash, so that every read can
be checked. Each kind of fault is injected into many blocks: into their files while no process has them, into the
running tier's files, or by the seam `kv_tiers.files.Files`. Afterwards every block is read. `wrong`: bytes that differ
from those put. `lost`: blocks that no fault concerned and that were not returned. `hangs`: calls that took over 10 s;
an exception ends the run. `found`: what the tier counted, by kind. Each round of `kill writers` ends two child
processes that write to one path.
"""

import argparse
import errno
import faulthandler
import hashlib
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.faulty_files import FaultyFiles, Killed
from common.ids import BlockHash, HashRoot
from kv_tiers.health import RETRY_S
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers, TierSettings

SLOT_BYTES = 4096
ROOT = HashRoot(b"r" * 32)
NUM_SLOTS = 64
_HANG_S = 10.0
_LONGEST_S = 7200.0
_CHILD_BLOCK_BYTES = 1 << 18
_CHILD_SLOTS = 32


def hash_of(i: int) -> BlockHash:
    """Return the hash of block i, which is not 0."""
    return BlockHash(i.to_bytes(16, "little"))


def data_of(i: int, num_bytes: int) -> bytes:
    """Return the bytes of block i."""
    return hashlib.blake2b(hash_of(i)).digest() * (num_bytes // 64)


def _settings(path: Path, *, num_slots: int, block_bytes: int) -> TierSettings:
    stride = -(-block_bytes // SLOT_BYTES) * SLOT_BYTES + RECORD_BYTES
    return TierSettings(
        host_bytes=0, disk_bytes=num_slots * stride, path=path, fingerprint="model", block_bytes=block_bytes
    )


@dataclass
class Outcome:
    """What one kind of fault has done."""

    faults: int = 0
    reads: int = 0
    found: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    hangs: int = 0


class Clock:
    """Time that only faults move."""

    now_s = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s


class World:
    """One path, its tiers, and the count of what they do."""

    def __init__(self, path: Path, rng: random.Random, *, num_slots: int = NUM_SLOTS, block_bytes: int = 64) -> None:
        self.path = path
        self.rng = rng
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.files = FaultyFiles()
        self.clock = Clock()
        self.outcome = Outcome()
        self.tiers = self._opened()
        self._next = 1

    def settings(self, fingerprint: str = "model") -> TierSettings:
        """Return the settings for a model."""
        settings = _settings(self.path, num_slots=self.num_slots, block_bytes=self.block_bytes)
        return replace(settings, fingerprint=fingerprint)

    def _opened(self) -> Tiers:
        with self._timed():
            return Tiers.open(self.settings(), files=self.files, clock=self.clock)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self.outcome.hangs += time.perf_counter() - begun_s > _HANG_S

    def fill(self, count: int) -> list[int]:
        """Put new blocks and return their numbers; filling all slots evicts every other block."""
        numbers = list(range(self._next, self._next + count))
        self._next += count
        with self._timed():
            for i in numbers:
                self.tiers.put(hash_of(i), ROOT, memoryview(data_of(i, self.block_bytes)))
        return numbers

    def check(self, numbers: Iterable[int], *, untouched: Iterable[int] = (), tiers: Tiers | None = None) -> None:
        """Read blocks; those that no fault concerned must be there."""
        must = set(untouched)
        for i in {*numbers, *must}:
            with self._timed():
                got = (tiers or self.tiers).get(hash_of(i), ROOT)
            self.outcome.reads += 1
            self.outcome.wrong += got is not None and got != data_of(i, self.block_bytes)
            self.outcome.lost += got is None and i in must

    def close(self) -> None:
        """Close the tiers and keep their counts."""
        self._count()
        self.tiers.close()

    def kill(self) -> None:
        """End the process that has the tiers."""
        self._count()
        self.files.kill()

    def _count(self) -> None:
        self.outcome.found.update(self.tiers.stats().tiers["disk"].dropped)

    def reopen(self) -> None:
        """Open the tiers again."""
        self.files = FaultyFiles()
        self.tiers = self._opened()

    def file(self, name: str) -> Path:
        """Return a file of the tier's folder."""
        return next(self.path.glob(f"*/0/{name}"))

    def victims(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return which blocks a fault concerns, by slot (they lie in order), and which it leaves alone."""
        spared = set(self.rng.sample(numbers, len(numbers) // 8))
        self.outcome.faults += len(numbers) - len(spared)
        return [i for i in numbers if i not in spared], sorted(spared)


def flip_in_record(world: World) -> None:
    """A bit of a record is flipped, in any field, while no process runs."""
    _flip(world, "index", RECORD_BYTES, RECORD_BYTES, is_running=False)


def flip_in_block(world: World) -> None:
    """A bit of a block is flipped."""
    _flip(world, "blocks", SLOT_BYTES, world.block_bytes, is_running=True)


def _flip(world: World, name: str, stride: int, num_bytes: int, *, is_running: bool) -> None:
    slots = _slots_of(world, world.fill(world.num_slots))
    hit, spared = world.victims(list(slots))
    if not is_running:
        world.close()
    with world.file(name).open("r+b", buffering=0) as file:
        for i in hit:
            at = slots[i] * stride + world.rng.randrange(num_bytes)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << world.rng.randrange(8)]))
    if not is_running:
        world.reopen()
    world.check(hit, untouched=spared)


def swap_records(world: World) -> None:
    """Records change places."""
    _shuffle(world, "index", RECORD_BYTES)


def swap_blocks(world: World) -> None:
    """Bytes of blocks change places."""
    _shuffle(world, "blocks", SLOT_BYTES)


def _shuffle(world: World, name: str, stride: int) -> None:
    slots = _slots_of(world, world.fill(world.num_slots))
    hit, spared = world.victims(list(slots))
    world.close()
    file = world.file(name)
    content = file.read_bytes()
    changed = bytearray(content)
    for i, j in zip(hit, hit[1:] + hit[:1], strict=True):
        here, there = slots[i] * stride, slots[j] * stride
        changed[here : here + stride] = content[there : there + stride]
    file.write_bytes(changed)
    world.reopen()
    world.check(hit, untouched=spared)


def stale_index(world: World) -> None:
    """An index from before all blocks were replaced."""
    old = world.fill(world.num_slots)
    index = world.file("index").read_bytes()
    new = world.fill(world.num_slots)
    world.outcome.faults += len(old)
    world.close()
    world.file("index").write_bytes(index)
    world.reopen()
    world.check([*old, *new])


def stale_model(world: World) -> None:
    """Folders and records of another model."""
    ours = world.fill(world.num_slots)
    world.close()
    other = Tiers.open(world.settings("other weights"))  # removes ours
    for i in ours:
        other.put(hash_of(i), ROOT, memoryview(bytes(world.block_bytes)))
    other.close()
    kept = world.path.with_name("kept")
    shutil.copytree(world.path, kept)
    world.reopen()  # removes the other's
    world.check(ours)
    world.close()
    for name in ("index", "blocks"):
        shutil.copy(next(kept.glob(f"*/0/{name}")), world.file(name))
    shutil.rmtree(kept)
    world.reopen()
    world.check(ours)
    world.outcome.faults += 2 * len(ours)


def truncate(world: World) -> None:
    """A file is cut at any place, under a running process or between two."""
    slots = _slots_of(world, world.fill(world.num_slots))
    name, stride = world.rng.choice([("index", RECORD_BYTES), ("blocks", SLOT_BYTES)])
    end = world.rng.randrange(world.num_slots * stride)
    is_running = world.rng.random() < 0.5
    if not is_running:
        world.close()
    with world.file(name).open("r+b") as file:
        file.truncate(end)
    if not is_running:
        world.reopen()
    world.outcome.faults += 1
    world.check(slots, untouched=[i for i, slot in slots.items() if (slot + 1) * stride <= end])
    world.close()
    world.reopen()
    world.check(slots)


def torn_write(world: World) -> None:
    """A process ends after any number of bytes of a put, and another one goes on."""
    for end in range(2 * RECORD_BYTES + world.block_bytes):
        world.fill(world.num_slots - len(world.tiers) + 1)
        kept = _numbers_in(world)
        left = [end]

        def die(path: Path, num_bytes: int, left: list[int] = left) -> int:
            if not left[0]:
                raise Killed
            most = min(num_bytes, left[0])
            left[0] -= most
            return most

        world.files.before_write = die
        with suppress(Killed):
            world.fill(1)
        world.kill()
        world.reopen()
        world.outcome.faults += 1
        world.check(_numbers_in(world), untouched=kept[1:])


def io_errors(world: World) -> None:
    """Reads and writes fail with ENOSPC, EDQUOT or EIO, before or after some bytes, or are short."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EIO)

    def fail(path: Path, num_bytes: int) -> int | None:
        draw = world.rng.random()
        if draw < 0.7:
            return None
        world.outcome.faults += 1
        if draw < 0.8:
            return world.rng.randrange(1, num_bytes + 1)
        raise OSError(world.rng.choice(codes), "injected")

    world.files.before_write = world.files.before_read = fail
    for _ in range(20):
        world.check(world.fill(10))
        world.check(_numbers_in(world))
        world.clock.now_s += RETRY_S
    world.files.before_write = world.files.before_read = lambda path, num_bytes: None
    world.clock.now_s += RETRY_S
    world.check([], untouched=world.fill(world.num_slots))


def slow_disk(world: World) -> None:
    """Each read and write takes up to five seconds."""

    def wait(path: Path, num_bytes: int) -> None:
        world.clock.now_s += world.rng.uniform(0, 5)
        world.outcome.faults += 1

    world.files.before_write = world.files.before_read = wait
    world.check(world.fill(world.num_slots))
    world.clock.now_s += RETRY_S
    world.check(world.fill(1))


def vanished_folder(world: World) -> None:
    """The folder is removed under a running process."""
    world.check([], untouched=world.fill(4))
    shutil.rmtree(world.path)
    world.outcome.faults += 1
    world.check(world.fill(4))
    world.clock.now_s += RETRY_S
    world.check([], untouched=world.fill(4))


def two_writers(world: World) -> None:
    """Processes open, write and close one path at the same time."""

    def work(first: int) -> list[int]:
        numbers = [world.rng.randrange(1 << 40) << 8 | first for _ in range(8)]
        tiers = Tiers.open(world.settings())
        for i in numbers:
            tiers.put(hash_of(i), ROOT, memoryview(data_of(i, world.block_bytes)))
        got = [tiers.get(hash_of(i), ROOT) for i in numbers]
        tiers.close()
        return [i for i, data in zip(numbers, got, strict=True) if data != data_of(i, world.block_bytes)]

    with ThreadPoolExecutor(4) as pool:
        for bad in pool.map(work, range(4)):
            world.outcome.faults += 1
            world.outcome.reads += 8
            world.outcome.wrong += len(bad)
    world.check(_numbers_in(world))


def kill_writers(world: World) -> None:
    """Two child processes write to the path until SIGKILL ends them, at any time."""
    world.close()
    seeds = [world.rng.randrange(1 << 30) for _ in range(2)]
    command = [sys.executable, "-m", "benchmarks.tier_faults", "--write", str(world.path)]
    children = [subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE) for seed in seeds]
    for child in children:
        assert child.stdout is not None
        child.stdout.read(1)  # it writes now
    time.sleep(world.rng.uniform(0, 0.02))
    for child in children:
        child.kill()
        child.communicate(timeout=_HANG_S)
        world.outcome.faults += 1
    world.reopen()
    second = Tiers.open(world.settings())
    for tiers in (world.tiers, second):
        numbers = [int.from_bytes(block_hash, "little") for block_hash in tiers.snapshot()]
        world.check(numbers, tiers=tiers)
    world.outcome.found.update(second.stats().tiers["disk"].dropped)
    second.close()


def write_forever(path: Path, seed: int) -> None:
    """Put blocks until the process is killed, or its parent has ended; says on standard output when it begins."""
    parent = os.getppid()
    tiers = Tiers.open(_settings(path, num_slots=_CHILD_SLOTS, block_bytes=_CHILD_BLOCK_BYTES))
    print("w", end="", flush=True)
    i = seed << 20
    while os.getppid() == parent:
        i += 1
        tiers.put(hash_of(i), ROOT, memoryview(data_of(i, _CHILD_BLOCK_BYTES)))


def _slots_of(world: World, numbers: list[int]) -> dict[int, int]:
    """Return the slots in which blocks are, by the index."""
    index = world.file("index").read_bytes()
    hashes = [index[at + 24 : at + 40] for at in range(0, len(index), RECORD_BYTES)]
    slots = {block_hash: slot for slot, block_hash in enumerate(hashes)}
    return {i: slots[hash_of(i)] for i in numbers}


def _numbers_in(world: World) -> list[int]:
    """Return the blocks of the tier, the least recently used first."""
    return [int.from_bytes(block_hash, "little") for block_hash in world.tiers.snapshot()]


@dataclass(frozen=True)
class Kind:
    """One kind of fault, and its part of all."""

    inject: Callable[[World], None]
    share: float = 0.0
    at_least: int = 1
    num_slots: int = NUM_SLOTS
    block_bytes: int = 64


KINDS = (
    Kind(kill_writers, 0.0004, at_least=2, num_slots=_CHILD_SLOTS, block_bytes=_CHILD_BLOCK_BYTES),  # takes longest
    Kind(flip_in_record, 0.35),
    Kind(flip_in_block, 0.25),
    Kind(swap_records, 0.1),
    Kind(swap_blocks, 0.1),
    Kind(stale_index, 0.06),
    Kind(stale_model, 0.06),
    Kind(truncate, 0.01, num_slots=8),
    Kind(torn_write, 0.02, num_slots=4),
    Kind(io_errors, 0.035),
    Kind(slow_disk, 0.01),
    Kind(vanished_folder, 0.001),
    Kind(two_writers, 0.003),
)


def run(kind: Kind, num_faults: int, *, seed: int, folder: Path) -> Outcome:
    """Inject faults of one kind, at least so many, and return what they did."""
    rng = random.Random(f"{seed} {kind.inject.__name__}")
    path = folder / kind.inject.__name__
    world = World(path, rng, num_slots=kind.num_slots, block_bytes=kind.block_bytes)
    while world.outcome.faults < num_faults:
        kind.inject(world)
        world.close()
        world.reopen()
    world.close()
    shutil.rmtree(path)
    return world.outcome


def _begin() -> None:
    logging.disable(logging.WARNING)  # alarms are what this is about
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)  # a hang that never ends


def main() -> None:
    """Inject all kinds, print the table and write the file."""
    parser = command_line("tier_faults", __doc__)
    parser.add_argument("--faults", type=int, default=1_000_000, help="faults of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="kinds, such as torn_write")
    parser.add_argument("--jobs", type=int, default=2, help="kinds at a time")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write_forever(args.write, args.seed)
        return
    begun = time.perf_counter()
    table = Table("fault", "faults", "reads", "wrong", "lost", "hangs", "found")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(args.jobs, initializer=_begin) as pool:
        runs = {}
        for kind in (kind for kind in KINDS if not args.only or kind.inject.__name__ in args.only):
            num_faults = max(kind.at_least, round(kind.share * args.faults))
            name = kind.inject.__name__.replace("_", " ")
            runs[name] = pool.submit(run, kind, num_faults, seed=args.seed, folder=Path(folder))
        outcomes = {name: running.result() for name, running in runs.items()}
    for name, outcome in (*outcomes.items(), ("all", total(outcomes.values()))):
        cells = (outcome.faults, outcome.reads, outcome.wrong, outcome.lost, outcome.hangs)
        found = ", ".join(f"{kind} {count:,}" for kind, count in outcome.found.most_common())
        table.add_row(name, *(f"{count:,}" for count in cells), found)
    terminal().print(table)
    rows = {name: {**vars(outcome), "found": dict(outcome.found)} for name, outcome in outcomes.items()}
    took_s = time.perf_counter() - begun
    document = {"method": "benchmarks/tier_faults.py", "machine": machine(), "took_s": round(took_s), "kinds": rows}
    write_json(args.json, document)


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the sum of all kinds."""
    whole = Outcome()
    for outcome in outcomes:
        whole.faults += outcome.faults
        whole.reads += outcome.reads
        whole.found += outcome.found
        whole.wrong += outcome.wrong
        whole.lost += outcome.lost
        whole.hangs += outcome.hangs
    return whole


if __name__ == "__main__":
    main()
