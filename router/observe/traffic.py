"""Recordings of a tenant's traffic: arrival times, lengths, and which prompts begin alike.

A recording holds no content and nothing from which content could be derived. A block hash could be confirmed by a guess
of its tokens and the tenant's salt, so a recording has a keyed hash of it, under a secret that is drawn for the
recording and forgotten with it. Two recordings of one prompt have nothing in common.

    RecordTraffic ──open──▶ Recording ◀──following── every request of the tenant, from its admission to its end
          ▲                    │
          └──── next ──────────┘  bounded: without a reader, further requests are counted and dropped

A request is noted when it ends, and only if the recording was open when the request arrived; otherwise the beginning of
a recording would have its long requests without its short ones.
"""

import asyncio
import hashlib
import math
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from common.block_hash import BlockHashes, extend_hash
from common.clock import Clock
from common.errors import Overloaded
from common.lifecycle import State
from kvrelay.v1 import inference_pb2 as pb
from router.record.record import Job, RunningRequest

MAX_RECORDINGS = 4
"""Concurrent recordings of one tenant."""
MAX_WAITING = 4096
"""Requests that wait for the reader."""
MAX_WAITING_BYTES = 16 << 20
"""Size of the block hashes of waiting requests."""
KEY_BYTES = 8
_KEYS_PER_TURN = 256
"""Keys that are made in one turn of the event loop; 0.2 ms."""


class Recording:
    """One recording. Event loop only; one reader."""

    def __init__(self, *, started_s: float) -> None:
        self._started_s = started_s
        self._cipher = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=KEY_BYTES)
        self._waiting: deque[tuple[pb.RecordedRequest, BlockHashes]] = deque()
        self._num_waiting_bytes = 0
        self._num_dropped = 0
        self._num_followed = 0
        self._is_taking = True
        self._changed = asyncio.Event()

    def finish(self) -> None:
        """Take no more requests; the recording ends with those already taken."""
        self._is_taking = False
        self._changed.set()

    def take(self, record: RunningRequest) -> bool:
        """Return whether a request that is about to run belongs to the recording; if so, `note` must follow."""
        is_taken = self._is_taking and record.life.received_s >= self._started_s
        self._num_followed += is_taken
        return is_taken

    def note(self, record: RunningRequest) -> None:
        """Note a taken request that has ended; drop it when too many wait for the reader."""
        self._num_followed -= 1
        self._changed.set()
        hashes = _all_hashes(record.job)
        if len(self._waiting) >= MAX_WAITING or self._num_waiting_bytes + len(hashes.packed) > MAX_WAITING_BYTES:
            self._num_dropped += 1
            return
        self._num_waiting_bytes += len(hashes.packed)
        request = pb.RecordedRequest(
            arrival_s=record.life.received_s - self._started_s,
            num_prompt_tokens=len(record.job.prompt_token_ids),
            num_output_tokens=record.ledger.num_tokens / record.job.sampling.n,
            outcome=_outcome(record),
            block_size=record.job.model.block_size,
        )
        self._waiting.append((request, hashes))

    async def next(self) -> pb.RecordTrafficResponse | None:
        """Return the message of the next request; None at the end."""
        while not self._waiting:
            if not self._is_taking and not self._num_followed:
                return None
            self._changed.clear()
            await self._changed.wait()
        request, hashes = self._waiting.popleft()
        self._num_waiting_bytes -= len(hashes.packed)
        request.block_keys = await self._keys(hashes)
        return self.message(request)

    def message(self, request: pb.RecordedRequest | None = None) -> pb.RecordTrafficResponse:
        """Return a message with the number of requests dropped so far."""
        return pb.RecordTrafficResponse(request=request, num_dropped=self._num_dropped)

    async def _keys(self, hashes: BlockHashes) -> bytes:
        keys = bytearray()
        for position, digest in enumerate(hashes.digests()):
            if position and position % _KEYS_PER_TURN == 0:
                await asyncio.sleep(0)  # a long prompt must not delay tokens
            cipher = self._cipher.copy()
            cipher.update(digest)
            keys += cipher.digest()
        return bytes(keys)


class TrafficRecordings:
    """All open recordings. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of_tenant: dict[str, list[Recording]] = {}

    @property
    def num_open(self) -> int:
        """Number of open recordings."""
        return sum(map(len, self._of_tenant.values()))

    @contextmanager
    def open(self, tenant: str, *, duration_s: float = math.inf) -> Iterator[Recording]:
        """Record the tenant's requests inside the block, up to `duration_s` seconds. Raises Overloaded."""
        running = self._of_tenant.setdefault(tenant, [])
        if len(running) >= MAX_RECORDINGS:
            raise Overloaded(f"{len(running)} recordings of this tenant run already")
        recording = Recording(started_s=self._clock.monotonic())
        running.append(recording)
        timer = None if duration_s == math.inf else asyncio.get_running_loop().call_later(duration_s, recording.finish)
        try:
            yield recording
        finally:
            if timer is not None:
                timer.cancel()
            running.remove(recording)
            if not running:
                del self._of_tenant[tenant]

    def finish(self) -> None:
        """Let all recordings end with the running requests."""
        for recordings in self._of_tenant.values():
            for recording in recordings:
                recording.finish()

    @contextmanager
    def following(self, record: RunningRequest) -> Iterator[None]:
        """Note how the request that runs inside the block ends."""
        recordings = [recording for recording in self._of_tenant.get(record.tenant.name, ()) if recording.take(record)]
        try:
            yield
        finally:
            for recording in recordings:
                recording.note(record)


def _all_hashes(job: Job) -> BlockHashes:
    """Return the hashes of the prompt's blocks, including the partly filled last one."""
    hashes = job.prompt_hashes
    tail = job.prompt_token_ids[len(hashes) * job.model.block_size :]
    if not tail:
        return hashes
    return BlockHashes(hashes.packed + extend_hash(hashes[-1] if len(hashes) else job.model.root, tail))


def _outcome(record: RunningRequest) -> str:
    if record.outbox.error is not None:
        return type(record.outbox.error).__name__
    return "completed" if record.life.state is State.FINISHED else "cancelled"
