"""The seam for ways of moving blocks: what a transport does at each step of one transfer.

1. Puller `offer`: whether this transport can fill the puller's pages; adds to OpenFetch what the peer needs to judge.
2. Server `reaches`: whether the server's pages can be reached from that puller.
3. Server `describe`: adds to FetchOpened what the puller needs to reach them.
4. Puller `fetch`: holds whatever the transfer needs, such as mapped memory, until its `async with` block is left. What
   later transfers from the peer need as well may be kept until `forget`.
5. Server `seal`: messages for blocks that are final; puller `Receiver.take`: fills pages from such a message. Where
   the server has said that it lends, the message names a slot of its ring, and the puller answers it (`Lending`).

A transport lives in a file of its own and is listed in `registry.py`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import xxhash

from common.config import TransferConfig
from common.errors import KvIncomplete, TransferError
from common.ids import BlockId, Epoch, WorkerId
from common.process import CannotStart
from common.wire_names import TRANSPORT_NUMBERS
from engine.device.shared_memory import host_id
from engine.kv_store import KvStore
from kvrelay.v1 import kv_transfer_pb2 as pb

_Result = TypeVar("_Result")


class PeerLife(NamedTuple):
    """A peer, from one start or change of role to the next."""

    worker_id: WorkerId
    epoch: Epoch


class PeerMemoryUnreachable(Exception):
    """A peer's memory cannot be mapped; the message says why."""


class TransportUnusable(CannotStart):
    """A worker cannot use a transport that is configured; the message says why, and what to do."""

    key = "transfer.transports"


@dataclass(slots=True)
class PullTarget:
    """The puller's pages for one transfer. The event loop and one executor thread take turns."""

    page_ids: tuple[BlockId, ...]
    """Those of the blocks, then window pages."""
    missing: set[int]
    """Indexes of the pages that have not arrived."""

    def pages_of(self, indexes: range) -> list[BlockId]:
        """Return the pages for blocks that arrive. Raises KvIncomplete when one was not asked for, or came before."""
        if not self.missing.issuperset(indexes):
            raise KvIncomplete(f"blocks {indexes} were not asked for, or came twice")
        return [self.page_ids[i] for i in indexes]


class Receiver(Protocol):
    """The puller's end of one transfer."""

    def take(self, message: pb.FetchBlocksResponse) -> None:
        """Fill pages from a message of the transport's kind, and mark their blocks as arrived.

        The bytes are in place when this returns. Any thread. Raises KvIncomplete.
        """
        ...


class SealedReceiver(ABC):
    """A `Receiver` of messages that name pages or buffers of the server."""

    def __init__(self, target: PullTarget) -> None:
        self._target = target

    @abstractmethod
    def copy(self, blocks: pb.SealedBlocks, pages: Seq[BlockId]) -> None:
        """Copy the server's pages over our own. Any thread. Raises TransferError."""

    def take(self, message: pb.FetchBlocksResponse) -> None:
        """See `Receiver`."""
        blocks = message.staged if message.HasField("staged") else message.sealed
        indexes = range(blocks.first_block, blocks.first_block + len(blocks.block_ids))
        pages = self._target.pages_of(indexes)
        try:
            self.copy(blocks, pages)
        except TransferError as error:
            raise KvIncomplete(f"cannot copy the sealed blocks {indexes}: {error}") from error
        self._target.missing.difference_update(indexes)


Seal = Callable[[int, Seq[BlockId]], list[pb.FetchBlocksResponse]]
"""(index of the first block, pages): returns the messages for consecutive blocks of a sequence. Any thread."""


class Lending:
    """Slots of a ring that one transfer has filled for its puller, which reads them until it answers. Event loop only.

    All transfers of a worker share its slots. The `with` block gives back what the puller has not answered: no filling
    may run at its end.
    """

    _MAX_LENT = 2
    """One is filled while the puller reads the other."""

    def __init__(self, free: "asyncio.Queue[int]", seal: Callable[[int, int, Seq[BlockId]], Any]) -> None:
        """`free`: numbers of the slots that no transfer has; `seal`: a `Seal` behind the slot to fill."""
        self._free = free
        self._seal = seal
        self._lent: deque[int] = deque()

    def __enter__(self) -> "Lending":
        return self

    def __exit__(self, *_: object) -> None:
        while self._lent:
            self.take_back()

    @property
    def num_lent(self) -> int:
        """Slots that the puller has not answered."""
        return len(self._lent)

    @property
    def is_full(self) -> bool:
        """Whether an answer must come before the next slot is filled."""
        return len(self._lent) >= self._MAX_LENT

    async def lend(self) -> Seal:
        """Wait for a free slot and return what fills it."""
        slot = await self._free.get()
        self._lent.append(slot)
        return partial(self._seal, slot)

    def take_back(self) -> None:
        """Free the oldest slot: the puller has answered."""
        self._free.put_nowait(self._lent.popleft())


class Transport(ABC):
    """One way of moving blocks, on one worker, as server and as puller. Event loop only, unless a method says more."""

    name: ClassVar[str]
    """As in serving.yaml, in metrics and, in capitals, in worker_pb2.KvTransport."""
    payload: ClassVar[Literal["chunk", "sealed"]]
    """Kind of FetchBlocksResponse that carries blocks."""
    reads_pages: ClassVar[bool] = True
    """Whether `seal` copies pages: it then runs on an executor thread, for a few blocks at a time."""
    pulls_from_itself: ClassVar[bool] = True
    """Whether a process can pull from itself, by which a worker measures a transport at its start (link_rates.py)."""

    def __init__(self, store: KvStore, config: TransferConfig) -> None:
        """Raises TransportUnusable."""
        self._store = store
        self._config = config

    @property
    def number(self) -> int:
        """Value of worker_pb2.KvTransport."""
        return TRANSPORT_NUMBERS[self.name]

    def offer(self, opened: pb.OpenFetch) -> bool:
        """Return whether this transport can fill our own pages; adds to `opened` what the peer needs to judge."""
        return True

    def reaches(self, opened: pb.OpenFetch) -> bool:
        """Return whether the puller can reach our own pages."""
        return True

    def describe(self, opened: pb.FetchOpened) -> None:  # noqa: B027 - a stream of chunks needs nothing
        """Add what the puller needs to reach our own pages."""

    @abstractmethod
    def seal(self, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
        """Return the messages for consecutive blocks of a sequence. Any thread."""

    def lending(self) -> Lending | None:
        """Return the slots of one transfer, where `describe` says that they are lent; they are then sealed instead."""
        return None

    @abstractmethod
    def fetch(
        self, peer: PeerLife, opened: pb.FetchOpened, target: PullTarget
    ) -> AbstractAsyncContextManager[Receiver]:
        """Hold what one transfer needs. Entering it raises PeerMemoryUnreachable when that memory cannot be mapped."""

    def forget(self, peer: PeerLife) -> None:  # noqa: B027 - most keep nothing
        """Release what is kept for a peer: the connection to it has ended."""


async def to_end(work: Callable[..., _Result], *args: object) -> _Result:
    """Run `work` in the executor; a cancellation waits for it, since what it uses may be freed right afterwards."""
    running = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():  # a call may be cancelled twice: by its caller, then by a stopping server
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


def is_same_host(opened: pb.OpenFetch) -> bool:
    """Return whether the puller runs on this host."""
    return bool(opened.host_id) and opened.host_id == host_id()


def sealed(first_block: int, block_ids: Seq[BlockId], checksums: Seq[int] = ()) -> pb.FetchBlocksResponse:
    """Return the message that names pages of the server."""
    blocks = pb.SealedBlocks(first_block=first_block, block_ids=block_ids, checksums=checksums)
    return pb.FetchBlocksResponse(sealed=blocks)


def checksums_of(data: memoryview, block_bytes: int) -> list[int]:
    """Return the checksum of each block's bytes."""
    return [xxhash.xxh3_64_intdigest(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)]
