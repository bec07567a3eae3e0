"""Injects faults into the tiers of whole workers while requests use them, and checks every token of every answer.

Method: two prefill workers and a decode worker with fake engines run in this process over real gRPC. Their pages hold a
part of one request's sessions, their tiers (host memory and disk) a part of all, so that blocks are written, evicted
and read back all the time. Clients ask for sessions of two tenants, each answer is compared with the oracle of the fake
engine, which turns any wrong byte of KV into a wrong token. Meanwhile faults are injected, several kinds at once:

* bytes: bits flipped on disk, in records and in host memory; reads and writes that fail, are slow, find a full disk or
  a folder that has been removed;
* pages: copied slowly, so that they are given away in between; landings taken back by bursts of requests;
* requests: cancelled while their tier is read, two for one prefix at once, another tenant's with the same tokens, and
  pulls by a peer whose source reads and evicts;
* workers: killed in the middle of a write (half of it is on disk, and nothing afterwards) and started again on the same
  folder, stopped in the middle of a read, moved to the other role and back.

A fault counts when it happened, not when it was planned. A request may fail only if a worker that it used was killed,
stopped or moved meanwhile. At the end nothing may be held: pages, leases, threads, files, shared memory.
"""

import asyncio
import errno
import gc
import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, terminal, write_json
from common.clock import Clock, SystemClock
from common.errors import KvrelayError, Overloaded
from common.ids import mint_handoff_id
from engine.fake_pages import fake_shape
from engine.request import EngineRequest
from engine.steps.planner import StepPlanner
from kv_tiers.files import Files
from kv_tiers.health import RETRY_S
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers, TierSettings
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.trust import as_router
from tests.worker.calls import Answer, messages
from tests.worker.cluster import Pool, core_of, make_runtime, serve_runtime, until_empty
from tests.worker.prefixes import where

SHAPE = fake_shape(BLOCK_SIZE)
PREFILLS = ("prefill-0", "prefill-1")
NAMES = (*PREFILLS, "decode-0")
_PAGES = 32
_HOST_BLOCKS = 48
_DISK_BLOCKS = 128
_SLOT_BYTES = 4096
_NUM_SESSIONS = 14
_NUM_CLIENTS = 5
_LONGEST_S = 60.0
"""Time after which a call hangs."""
_LEASE_S = 6.0
"""Time after which a handoff whose other side was killed is given up: there is no router to notice it."""
_SLOW_S = 0.06
"""A read of this time takes longer than computing."""
LIMIT_S = 0.03
"""Shortest time that a read gets."""


class ShiftedClock(Clock):
    """The system's clock, moved on by the injector, so that a disk that is off is tried again."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self.shift_s = 0.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._system.monotonic() + self.shift_s


class Faults:
    """Faults that are armed on one worker's disk, and what has happened. Any thread."""

    def __init__(self, counts: "Counter[str]") -> None:
        self.counts = counts
        self.armed: Counter[str] = Counter()
        self.on_read: Callable[[], object] | None = None
        """Called once, in the thread that reads."""
        self.is_dead = False
        self._lock = threading.Lock()

    def fires(self, kind: str) -> bool:
        """Use up one armed fault of a kind."""
        with self._lock:
            if self.armed[kind] <= 0:
                return False
            self.armed[kind] -= 1
            self.counts[kind] += 1
            return True

    def note_read(self) -> None:
        """Tell who waits for a read."""
        with self._lock:
            on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read()


class WorkerFiles(Files):
    """The system's files with the faults of one worker."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._names: dict[int, str] = {}

    def open(self, path: Path) -> int:
        """See `Files`."""
        self._check()
        fd = super().open(path)
        self._names[fd] = path.name
        return fd

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """See `Files`."""
        self._check()
        if self._names[fd] == "blocks":
            self._faults.note_read()
            if self._faults.fires("slow read"):
                time.sleep(_SLOW_S)
            if self._faults.fires("read error"):
                raise OSError(errno.EIO, "injected")
            if self._faults.fires("short read"):
                into = into[: max(1, len(into) // 2)]
        return super().read(fd, into, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """See `Files`."""
        self._check()
        if self._faults.fires("disk full"):
            raise OSError(errno.ENOSPC, "injected")
        if self._faults.fires("write error"):
            raise OSError(errno.EIO, "injected")
        if self._faults.fires("killed while it writes"):
            super().write(fd, data[: len(data) // 2], offset)
            self._faults.is_dead = True
        self._check()
        return super().write(fd, data, offset)

    def resize(self, fd: int, size: int) -> None:
        """See `Files`."""
        self._check()
        super().resize(fd, size)

    def sync(self, fd: int) -> None:
        """See `Files`."""
        self._check()
        super().sync(fd)

    def _check(self) -> None:
        if self._faults.is_dead:
            raise OSError(errno.EIO, "the process has ended")


@dataclass
class Tally:
    """What has happened."""

    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    """What workers and tiers have counted."""
    num_requests: int = 0
    num_cached_tokens: int = 0
    num_refused: int = 0
    """Requests for which there was no room."""
    num_failed: int = 0
    """Requests that failed as they may: with their worker."""
    wrong: list[str] = field(default_factory=list)
    """Wrong tokens, hangs, failures without a reason, and what was left behind."""


class World:
    """The workers, the clients and the injector."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.pool = Pool({}, {})
        self.faults: dict[str, Faults] = {}
        self.clock = ShiftedClock()
        self.is_over = False
        self._lives: Counter[str] = Counter()
        """Starts, stops and moves of each worker."""
        self._down: set[str] = set()
        """Workers that do not run, or change their role."""
        self._sessions = [
            [self.rng.randrange(10, 250) for _ in range(self.rng.randrange(24, 68))] for _ in range(_NUM_SESSIONS)
        ]

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, name: str) -> None:
        """Start a worker on the first free folder."""
        self.faults[name] = faults = Faults(self.tally.faults)
        settings = TierSettings(
            host_bytes=_HOST_BLOCKS * SHAPE.block_bytes,
            disk_bytes=_DISK_BLOCKS * (_SLOT_BYTES + RECORD_BYTES),
            path=self.path,
            fingerprint=SHAPE.fingerprint,
            block_bytes=SHAPE.block_bytes,
        )
        tiers = await asyncio.to_thread(Tiers.open, settings, files=WorkerFiles(faults), clock=self.clock)
        role = worker_pb2.WORKER_ROLE_PREFILL if name in PREFILLS else worker_pb2.WORKER_ROLE_DECODE
        runtime = make_runtime(
            role,
            name,
            transports=("grpc",),
            tiers=tiers,
            num_blocks=_PAGES if name in PREFILLS else 4 * _PAGES,
            max_running=2 if name in PREFILLS else 12,
            lease_ttl_s=_LEASE_S,
        )
        store: Any = runtime.executor.kv
        read_blocks, lives = store.read_blocks, core_of(runtime.engine.core).pool.lives

        def read_slowly(block_ids: Sequence[Any]) -> memoryview:
            """Copy the second half of a block a while after the first."""
            if not (threading.current_thread().name.startswith("tier-write") and faults.fires("page copied slowly")):
                data: memoryview = read_blocks(block_ids)
                return data
            before, first = [lives[i] for i in block_ids], read_blocks(block_ids)
            for _ in range(20):
                time.sleep(0.005)
                if before != [lives[i] for i in block_ids]:
                    self.tally.faults["page given away while it was copied"] += 1
                    time.sleep(0.005)
                    break
            half = len(first) // 2
            return memoryview(bytes(first[:half]) + bytes(read_blocks(block_ids)[half:]))

        store.read_blocks = read_slowly
        worker = self.pool.workers[name] = await serve_runtime(runtime)
        self.pool.channels[name] = as_router(worker.address)
        self._down.discard(name)

    async def stop(self, name: str) -> None:
        """Stop a worker; its calls fail."""
        self._lives[name] += 1
        self._down.add(name)
        worker, channel = self.pool.workers[name], self.pool.channels[name]
        runtime = worker.runtime
        assert runtime.tiers is not None
        await worker.stop(0)
        await channel.close()
        stats = runtime.tiers.tiers.stats()
        for tier, counts in stats.tiers.items():
            self.tally.seen[f"{tier} hits"] += counts.hits
            self.tally.seen[f"{tier} writes"] += counts.writes
            self.tally.seen[f"{tier} evictions"] += counts.evictions
            for kind, count in counts.dropped.items():
                self.tally.seen[f"{tier} dropped: {kind}"] += count
        for outcome, count in runtime.prefixes.tier_outcomes.items():
            self.tally.seen[f"reads: {outcome.value}"] += count
        for outcome, count in runtime.prefixes.outcomes.items():
            self.tally.seen[f"pulls: {outcome.value}"] += count
        self.tally.seen["blocks that had left their page"] += runtime.tiers.num_missed

    async def _restart(self, name: str) -> None:
        await self.stop(name)
        await self.start(name)

    # ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, session: int, salt: str) -> EngineRequest:
        tokens = self._sessions[session]
        num_tokens = self.rng.randrange(len(tokens) * 2 // 3, len(tokens) + 1)
        tail = [self.rng.randrange(10, 250) for _ in range(self.rng.randrange(1, 6))]
        max_tokens = self.rng.choice((1, 3, 3, 24))
        return make_request([*tokens[:num_tokens], *tail], salt=salt, max_tokens=max_tokens, ignore_eos=True)

    async def ask(self, prefill: str, session: int, *, salt: str = "", peer: str | None = None) -> Answer | None:
        """Ask for an answer and check it; None when it failed. `peer`: whom to pull from, or "local": no prefill."""
        request = self._request(session, salt)
        involved = {"decode-0"} if peer == "local" else {prefill, "decode-0"}
        lives = {name: self._lives[name] for name in involved - self._down}
        pair = self.pool.pair(prefill, "decode-0")
        self.tally.num_requests += 1
        try:
            async with asyncio.timeout(_LONGEST_S):
                if peer == "local":
                    answer = await pair.answer_locally(request)
                elif peer is None:
                    answer = await pair.answer(request)
                else:
                    source = where(self.pool.workers[peer], len(request.prompt_token_ids) // BLOCK_SIZE)
                    self.tally.faults["peer pulls while its source reads and evicts"] += 1
                    answer = await pair.answer(request, source)
            answer.checked(request)
        except Overloaded:
            self.tally.num_refused += 1
            return None
        except TimeoutError:
            self._wrong(f"a call to {prefill} hangs")
            return None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a lost worker leads to
            if all(self._lives[name] == lives.get(name) for name in involved):
                what = "wrong tokens" if isinstance(error, AssertionError) else type(error).__name__
                self._wrong(f"{what}: {error}")
            self.tally.num_failed += 1
            await asyncio.sleep(0.01)
            return None
        self.tally.num_cached_tokens += answer.num_cached
        return answer

    async def client(self) -> None:
        """Ask until it is over."""
        while not self.is_over:
            prefill, other = self.rng.sample(PREFILLS, 2)
            peer = self.rng.choice((other, "local", None, None))
            salt = self.rng.choice(("", "", "", "b"))
            await self.ask(prefill, self._session(), salt=salt, peer=peer)

    def _session(self) -> int:
        return min(int(self.rng.paretovariate(0.6)) - 1, _NUM_SESSIONS - 1)

    def _wrong(self, what: str) -> None:
        self.tally.wrong.append(what)

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def inject(self, num_faults: int) -> None:
        """Inject faults until so many have happened, or something is wrong."""
        common = [self._arm, self._flip_disk, self._flip_memory, self._twins, self._stranger, self._arm]
        rare: list[Callable[[], Awaitable[None]]] = [
            self._cancel,
            self._cancel,
            self._cancel,
            self._burst,
            self._vanish,
            self._kill,
            self._stop_in_read,
            self._change_role,
            self._flip_record,
        ]
        while self.tally.faults.total() < num_faults and not self.tally.wrong:
            await self.rng.choice(common)()
            if self.rng.random() < 0.12:
                await self.rng.choice(rare)()
            await asyncio.sleep(0.004)
        self.is_over = True

    async def _arm(self) -> None:
        kinds = ("slow read", "read error", "short read", "disk full", "write error", "page copied slowly")
        armed = self.faults[self.rng.choice(NAMES)].armed
        kind = self.rng.choice((*kinds, "page copied slowly"))
        armed[kind] = max(armed[kind], self.rng.choice((1, 1, 2, 3, 9)))
        if self.rng.random() < 0.5:
            self.clock.shift_s += RETRY_S + 1

    async def _flip_disk(self) -> None:
        self._flip("blocks", "bit flipped on disk", lambda: self.rng.randrange(_DISK_BLOCKS) * _SLOT_BYTES, 32)

    async def _flip_record(self) -> None:
        place = lambda: self.rng.randrange(_DISK_BLOCKS) * RECORD_BYTES  # noqa: E731
        self._flip("index", "bit flipped in a record", place, RECORD_BYTES)

    def _flip(self, name: str, kind: str, place: Callable[[], int], size: int) -> None:
        files = sorted(self.path.glob(f"*/*/{name}"))
        if not files:
            return
        with suppress(FileNotFoundError), self.rng.choice(files).open("r+b") as file:
            for _ in range(3):
                offset = place() + self.rng.randrange(size)
                byte = os.pread(file.fileno(), 1, offset)
                if byte:
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self.rng.randrange(8)]), offset)
                    self.tally.faults[kind] += 1

    async def _flip_memory(self) -> None:
        tiers: Any = self.pool.workers[self.rng.choice(NAMES)].runtime.tiers
        host = tiers.tiers._open.get("host")  # noqa: SLF001
        with suppress(ValueError):  # it has been closed
            if host is not None:
                memory = host._medium._bytes  # noqa: SLF001
                memory[self.rng.randrange(len(memory))] ^= 1 << self.rng.randrange(8)
                self.tally.faults["bit flipped in host memory"] += 1

    async def _twins(self) -> None:
        prefill, session = self.rng.choice(PREFILLS), self._session()
        await asyncio.gather(self.ask(prefill, session), self.ask(prefill, session))
        self.tally.faults["two requests for one prefix at once"] += 1

    async def _stranger(self) -> None:
        answer = await self.ask(self.rng.choice(PREFILLS), self._session(), salt=str(self.rng.random()))
        self.tally.faults["another tenant asks for the same tokens"] += 1
        if answer is not None and answer.num_cached:
            self._wrong("a tenant got another one's blocks")

    async def _burst(self) -> None:
        peer = self.rng.choice(("local", "local", None))
        prefill = self.rng.choice(PREFILLS)
        await asyncio.gather(*(self.ask(prefill, self._session(), peer=peer) for _ in range(12)))
        self.tally.faults["burst of requests"] += 1

    async def _cancel(self) -> None:
        name = self.rng.choice(PREFILLS)
        request = self._request(self.rng.randrange(_NUM_SESSIONS), "")
        pair, handoff_id = self.pool.pair(name, "decode-0"), mint_handoff_id()
        reading = self._until_read(name)
        decode = pair.open_decode(request, handoff_id)

        async def follow() -> None:
            await decode.read()
            prefill = pair.open_prefill(request, handoff_id)
            try:
                async for _message in messages(prefill):
                    pass
            finally:
                prefill.cancel()

        following = asyncio.create_task(follow())
        await asyncio.wait([reading, following], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        self.tally.faults["request cancelled while its tier is read"] += reading.done()
        for task in (following, reading):
            task.cancel()
        await asyncio.wait([following, reading])
        if not following.cancelled():
            following.exception()
        decode.cancel()

    def _until_read(self, name: str) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[None] = loop.create_future()

        def note() -> None:
            if not reading.done():
                reading.set_result(None)

        self.faults[name].on_read = lambda: loop.call_soon_threadsafe(note)
        return reading

    async def _vanish(self) -> None:
        folders = sorted(self.path.glob("*/*"))
        if folders:
            await asyncio.to_thread(shutil.rmtree, self.rng.choice(folders), ignore_errors=True)
            self.tally.faults["folder removed"] += 1
            self.clock.shift_s += RETRY_S + 1

    async def _kill(self) -> None:
        name = self.rng.choice(NAMES)
        faults = self.faults[name]
        faults.armed["killed while it writes"] = 1
        for _ in range(100):
            if faults.is_dead:
                break
            await asyncio.sleep(0.01)
        faults.armed["killed while it writes"] = 0
        await self._restart(name)

    async def _stop_in_read(self) -> None:
        name = self.rng.choice(NAMES)
        reading = self._until_read(name)
        await asyncio.wait([reading], timeout=1.0)
        self.tally.faults["worker stopped in mid-read"] += reading.done()
        reading.cancel()
        await self._restart(name)

    async def _change_role(self) -> None:
        name = self.rng.choice(PREFILLS)
        runtime = self.pool.workers[name].runtime
        home = runtime.role
        for role in (worker_pb2.WORKER_ROLE_DECODE, home):
            self._lives[name] += 1
            self._down.add(name)
            with suppress(KvrelayError):  # it is not idle in time
                await runtime.change_role(role, epoch=runtime.epoch, grace_s=0.5)
                self.tally.faults["role changed"] += 1
            self._down.discard(name)


def _held() -> dict[str, int]:
    """Return what this process holds; its shared memory is in open files."""
    gc.collect()  # workers that have ended are in cycles
    files = Path("/proc/self/fd")
    return {
        "threads": sum(thread.name.startswith(("tier-", "engine")) for thread in threading.enumerate()),
        "files": sum(1 for _ in files.iterdir()) if files.exists() else 0,
        "named shared memory": sum(1 for _ in Path("/dev/shm").glob("*kvrelay*")),
    }


async def attack(path: Path, *, num_faults: int, seed: int) -> Tally:
    """Inject so many faults, and return what has happened; `Tally.wrong` is empty if all is well."""
    world = World(path, seed)
    taken_back = StepPlanner._take_back_landed  # noqa: SLF001

    def counted(self: StepPlanner, waiting: list[Any]) -> bool:
        is_taken = taken_back(self, waiting)
        world.tally.faults["landing revoked"] += is_taken
        return is_taken

    StepPlanner._take_back_landed = counted  # type: ignore[method-assign]  # noqa: SLF001
    try:
        for name in NAMES:
            await world.start(name)
        clients = [asyncio.create_task(world.client()) for _ in range(_NUM_CLIENTS)]
        await world.inject(num_faults)
        await asyncio.gather(*clients)
        for name in NAMES:
            try:
                await until_empty(world.pool.workers[name])
            except TimeoutError:
                world.tally.wrong.append(f"{name} still holds something")
    finally:
        StepPlanner._take_back_landed = taken_back  # type: ignore[method-assign]  # noqa: SLF001
        for name in world.pool.workers:
            await world.stop(name)
    return world.tally


async def _measure(num_faults: int, seed: int) -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        await attack(Path(folder), num_faults=100, seed=seed)  # what is made once is made now
        before = _held()
        tally = await attack(Path(folder), num_faults=num_faults, seed=seed)
        for _ in range(200):
            after = _held()
            if is_left := any(after[what] > before[what] for what in before):
                await asyncio.sleep(0.05)
        if is_left:
            tally.wrong.append(f"left behind: {before} before, {after} after")
    return tally


def main() -> None:
    """Print the counts by kind."""
    parser = command_line("tier_faults_worker", __doc__)
    parser.add_argument("--faults", type=int, default=10_000, help="faults to inject (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (default 1)")
    args = parser.parse_args()
    import worker.prefix_pull

    worker.prefix_pull.MIN_PULL_S = LIMIT_S
    began_s = time.monotonic()
    tally = asyncio.run(_measure(args.faults, args.seed))
    seconds = time.monotonic() - began_s
    console = terminal()
    rows = {"faults": dict(tally.faults.most_common()), "seen": dict(sorted(tally.seen.items()))}
    for title, counts in rows.items():
        console.print(f"\n{title}: {sum(counts.values()) if title == 'faults' else ''}")
        for kind, count in counts.items():
            console.print(f"  {kind:50} {count:8}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary = {
        "requests": tally.num_requests,
        "refused": tally.num_refused,
        "failed with their worker": tally.num_failed,
        "cached tokens": tally.num_cached_tokens,
        "wrong": tally.wrong,
        "seconds": round(seconds, 1),
        "peak MiB": peak // 1024,
    }
    console.print(summary)
    write_json(args.json, summary | rows)
    if tally.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
