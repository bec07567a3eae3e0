"""The cluster of `tier_faults_worker.py`: workers whose tiers can fail, and clients that check every answer."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faulty_files import WorkerFiles
from common.clock import Clock, SystemClock
from common.errors import Overloaded
from engine.fake_pages import fake_shape
from engine.request import EngineRequest
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers, TierSettings
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.trust import as_router
from tests.worker.calls import Answer
from tests.worker.cluster import Pool, core_of, make_runtime, serve_runtime
from tests.worker.prefixes import where

SHAPE = fake_shape(BLOCK_SIZE)
PREFILLS = ("prefill-0", "prefill-1")
NAMES = (*PREFILLS, "decode-0")
SLOT_BYTES = 4096
DISK_BLOCKS = 128
NUM_SESSIONS = 14
_PAGES = 32
_HOST_BLOCKS = 48
_LONGEST_S = 60.0
"""Time after which a call hangs."""
_LEASE_S = 6.0
"""Time after which a handoff whose other side was killed is given up: there is no router to notice it."""


class ShiftedClock(Clock):
    """The system's clock, moved on by the injector, so that a disk that is off is tried again."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self.shift_s = 0.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._system.monotonic() + self.shift_s


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
    """The workers and the clients."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.pool = Pool({}, {})
        self.faults: dict[str, WorkerFiles] = {}
        self.clock = ShiftedClock()
        self.is_over = False
        self.lives: Counter[str] = Counter()
        """Starts, stops and moves of each worker."""
        self.down: set[str] = set()
        """Workers that do not run, or change their role."""
        self._sessions = [
            [self.rng.randrange(10, 250) for _ in range(self.rng.randrange(24, 68))] for _ in range(NUM_SESSIONS)
        ]

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, name: str) -> None:
        """Start a worker on the first free folder."""
        self.faults[name] = faults = WorkerFiles(self.tally.faults)
        settings = TierSettings(
            host_bytes=_HOST_BLOCKS * SHAPE.block_bytes,
            disk_bytes=DISK_BLOCKS * (SLOT_BYTES + RECORD_BYTES),
            path=self.path,
            fingerprint=SHAPE.fingerprint,
            block_bytes=SHAPE.block_bytes,
        )
        tiers = await asyncio.to_thread(Tiers.open, settings, files=faults, clock=self.clock)
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
        self.down.discard(name)

    async def stop(self, name: str) -> None:
        """Stop a worker; its calls fail."""
        self.lives[name] += 1
        self.down.add(name)
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
        self.tally.seen["blocks that had left their page"] += runtime.tiers.writes.num_missed

    async def restart(self, name: str) -> None:
        """Stop a worker and start it again on its folder."""
        await self.stop(name)
        await self.start(name)

    # ── clients ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, session: int, salt: str = "") -> EngineRequest:
        """Return a request for a part of a session."""
        tokens = self._sessions[session]
        num_tokens = self.rng.randrange(len(tokens) * 2 // 3, len(tokens) + 1)
        tail = [self.rng.randrange(10, 250) for _ in range(self.rng.randrange(1, 6))]
        max_tokens = self.rng.choice((1, 3, 3, 24))
        return make_request([*tokens[:num_tokens], *tail], salt=salt, max_tokens=max_tokens, ignore_eos=True)

    async def ask(self, prefill: str, session: int, *, salt: str = "", peer: str | None = None) -> Answer | None:
        """Ask for an answer and check it; None when it failed. `peer`: whom to pull from, or "local": no prefill."""
        request = self.request(session, salt)
        involved = {"decode-0"} if peer == "local" else {prefill, "decode-0"}
        lives = {name: self.lives[name] for name in involved - self.down}
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
            self.tally.wrong.append(f"a call to {prefill} hangs")
            return None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a lost worker leads to
            if all(self.lives[name] == lives.get(name) for name in involved):
                what = "wrong tokens" if isinstance(error, AssertionError) else type(error).__name__
                self.tally.wrong.append(f"{what}: {error}")
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
            await self.ask(prefill, self.session(), salt=salt, peer=peer)

    def session(self) -> int:
        """Return the index of a session, more often a small one."""
        return min(int(self.rng.paretovariate(0.6)) - 1, NUM_SESSIONS - 1)
