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
import gc
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, terminal, write_json
from benchmarks.tier_world import DISK_BLOCKS, NAMES, NUM_SESSIONS, PREFILLS, SLOT_BYTES, Tally, World
from common.errors import KvrelayError
from common.ids import mint_handoff_id
from engine.steps.planner import StepPlanner
from kv_tiers.health import RETRY_S
from kv_tiers.records import RECORD_BYTES
from kvrelay.v1 import worker_pb2
from tests.worker.calls import messages
from tests.worker.cluster import until_empty

_NUM_CLIENTS = 5
LIMIT_S = 0.03
"""Shortest time that a read gets."""


class Injector:
    """Injects faults into a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._happened = world.tally.faults

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
        while self._happened.total() < num_faults and not self._world.tally.wrong:
            await self._rng.choice(common)()
            if self._rng.random() < 0.12:
                await self._rng.choice(rare)()
            await asyncio.sleep(0.004)
        self._world.is_over = True

    async def _arm(self) -> None:
        kinds = ("slow read", "read error", "short read", "disk full", "write error", "page copied slowly")
        armed = self._world.faults[self._rng.choice(NAMES)].armed
        kind = self._rng.choice((*kinds, "page copied slowly"))
        armed[kind] = max(armed[kind], self._rng.choice((1, 1, 2, 3, 9)))
        if self._rng.random() < 0.5:
            self._world.clock.shift_s += RETRY_S + 1

    async def _flip_disk(self) -> None:
        self._flip("blocks", "bit flipped on disk", lambda: self._rng.randrange(DISK_BLOCKS) * SLOT_BYTES, 32)

    async def _flip_record(self) -> None:
        place = lambda: self._rng.randrange(DISK_BLOCKS) * RECORD_BYTES  # noqa: E731
        self._flip("index", "bit flipped in a record", place, RECORD_BYTES)

    def _flip(self, name: str, kind: str, place: Callable[[], int], size: int) -> None:
        files = sorted(self._world.path.glob(f"*/*/{name}"))
        if not files:
            return
        with suppress(FileNotFoundError), self._rng.choice(files).open("r+b") as file:
            for _ in range(3):
                offset = place() + self._rng.randrange(size)
                byte = os.pread(file.fileno(), 1, offset)
                if byte:
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self._rng.randrange(8)]), offset)
                    self._happened[kind] += 1

    async def _flip_memory(self) -> None:
        tiers: Any = self._world.pool.workers[self._rng.choice(NAMES)].runtime.tiers
        host = tiers.tiers._open.get("host")  # noqa: SLF001
        with suppress(ValueError):  # it has been closed
            if host is not None:
                memory = host._medium._bytes  # noqa: SLF001
                memory[self._rng.randrange(len(memory))] ^= 1 << self._rng.randrange(8)
                self._happened["bit flipped in host memory"] += 1

    async def _twins(self) -> None:
        prefill, session = self._rng.choice(PREFILLS), self._world.session()
        await asyncio.gather(self._world.ask(prefill, session), self._world.ask(prefill, session))
        self._happened["two requests for one prefix at once"] += 1

    async def _stranger(self) -> None:
        answer = await self._world.ask(self._rng.choice(PREFILLS), self._world.session(), salt=str(self._rng.random()))
        self._happened["another tenant asks for the same tokens"] += 1
        if answer is not None and answer.num_cached:
            self._world.tally.wrong.append("a tenant got another one's blocks")

    async def _burst(self) -> None:
        peer = self._rng.choice(("local", "local", None))
        prefill = self._rng.choice(PREFILLS)
        await asyncio.gather(*(self._world.ask(prefill, self._world.session(), peer=peer) for _ in range(12)))
        self._happened["burst of requests"] += 1

    async def _cancel(self) -> None:
        name = self._rng.choice(PREFILLS)
        request = self._world.request(self._rng.randrange(NUM_SESSIONS))
        pair, handoff_id = self._world.pool.pair(name, "decode-0"), mint_handoff_id()
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
        self._happened["request cancelled while its tier is read"] += reading.done()
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

        self._world.faults[name].on_read = lambda: loop.call_soon_threadsafe(note)
        return reading

    async def _vanish(self) -> None:
        folders = sorted(self._world.path.glob("*/*"))
        if folders:
            await asyncio.to_thread(shutil.rmtree, self._rng.choice(folders), ignore_errors=True)
            self._happened["folder removed"] += 1
            self._world.clock.shift_s += RETRY_S + 1

    async def _kill(self) -> None:
        name = self._rng.choice(NAMES)
        faults = self._world.faults[name]
        faults.armed["killed while it writes"] = 1
        for _ in range(100):
            if faults.is_dead:
                break
            await asyncio.sleep(0.01)
        faults.armed["killed while it writes"] = 0
        await self._world.restart(name)

    async def _stop_in_read(self) -> None:
        name = self._rng.choice(NAMES)
        reading = self._until_read(name)
        await asyncio.wait([reading], timeout=1.0)
        self._happened["worker stopped in mid-read"] += reading.done()
        reading.cancel()
        await self._world.restart(name)

    async def _change_role(self) -> None:
        name = self._rng.choice(PREFILLS)
        runtime = self._world.pool.workers[name].runtime
        home = runtime.role
        for role in (worker_pb2.WORKER_ROLE_DECODE, home):
            self._world.lives[name] += 1
            self._world.down.add(name)
            with suppress(KvrelayError):  # it is not idle in time
                await runtime.change_role(role, epoch=runtime.epoch, grace_s=0.5)
                self._happened["role changed"] += 1
            self._world.down.discard(name)


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
        await Injector(world).inject(num_faults)
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
