"""The serving side of a transfer: streams a handoff's blocks as they become final, or cached blocks by their hashes.

One stream: OpenFetch ▸ FetchOpened ▸ (SealedBlocks | BlockChunk)* ▸ Manifest ▸ AckFetch. The end of the stream ends the
handoff: an acknowledgement releases it; anything else aborts it and stops the prefill that fills it. Cached blocks are
pinned between two engine steps, and then served as a complete handoff. What follows them in tiers is sent out of
buffers and takes no pages (`offloaded.py`): a puller on this host copies it from there, others get it in chunks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import grpc

from common.block_hash import HASH_BYTES, BlockHashes
from common.errors import HandoffGone, InvalidRequest, LayoutMismatch, Overloaded, StaleEpoch
from common.ids import BlockId, Epoch, HandoffId, HashRoot, WorkerId
from common.rpc import error_boundary
from common.trust.credentials import Credentials
from common.trust.guard import caller
from common.trust.tickets import PullRight, check_ticket, of_blocks, of_handoff
from common.wire import message_of, pack_tokens
from common.wire_names import TRANSPORT_NUMBERS
from engine.kv_store import PIECE_BYTES, KvStore, page_bytes_of
from engine.thread import EngineDriver
from engine.window_ids import NO_WINDOWS
from kv_transfer.handoff import Handoff, HandoffManifest, HandoffTable
from kv_transfer.offloaded import Offloaded, OffloadedBlocks, ReadAhead
from kv_transfer.puller_stream import PullerStream
from kv_transfer.transports.grpc_chunks import GrpcChunks
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.transports.shared_memory import SharedMemory
from kv_transfer.transports.transport import Lending, Seal, Transport, to_end
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2

CheckPull = Callable[[WorkerId, pb.OpenFetch], None]
"""Checks the first message of a puller; takes the serving worker, too. Raises AccessDenied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of the serving side."""

    worker_id: WorkerId
    epoch: Callable[[], Epoch]
    """Returns the worker's current epoch."""
    transports: WorkerTransports
    lease_ttl_s: float
    check_pull: CheckPull
    offloaded: Offloaded | None = None
    """Blocks outside the pages; None: there are none."""
    chunk_bytes: int = 1 << 20
    """Most bytes of a message with such blocks."""


class KvTransferService(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Serves the blocks of one worker. `track` counts running calls, `on_bytes(transport, n)` bytes.

    Without an `engine` there are handoffs only, no cached blocks.
    """

    def __init__(
        self,
        *,
        table: HandoffTable,
        engine: EngineDriver | None,
        store: KvStore,
        settings: ServeSettings,
        track: Callable[[], AbstractContextManager[None]],
        on_bytes: Callable[[int, int], None],
    ) -> None:
        self._table = table
        self._engine = engine
        self._store = store
        self._settings = settings
        self._track = track
        self._on_bytes = on_bytes

    async def DescribePages(  # noqa: D102
        self, request: pb.DescribePagesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribePagesResponse:
        return pb.DescribePagesResponse(
            worker_id=self._settings.worker_id, layout=message_of(worker_pb2.KvLayout, self._store.shape)
        )

    # Handlers call `context.write`: the cleanup of an async generator would wait for its finalizer.
    async def FetchBlocks(  # type: ignore[override]  # noqa: D102
        self, request_iterator: AsyncIterator[pb.FetchBlocksRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with error_boundary(context, "FetchBlocks"):
            with self._track():
                puller = PullerStream(request_iterator, context, timeout_s=self._settings.lease_ttl_s)
                opened = await puller.opened()
                self._check(opened)
                self._settings.check_pull(self._settings.worker_id, opened)
                handoff = await self._attach(opened)
                try:
                    await self._stream(handoff, opened, puller)
                    await puller.acknowledged()
                    self._table.release(handoff)
                finally:
                    self._table.abort(handoff, HandoffGone("the puller went away"))

    async def _attach(self, opened: pb.OpenFetch) -> Handoff:
        if opened.handoff_id:
            return self._table.attach_puller(HandoffId(opened.handoff_id))
        engine = self._engine
        if engine is None:
            raise InvalidRequest("is empty, and there are no cached blocks here; name a handoff", field="handoff_id")
        hashes = self._hashes(opened)
        pinned = await engine.pin(hashes)

        def unpin() -> None:
            engine.post(lambda core: core.landings.unpin(pinned))

        manifest = HandoffManifest(
            num_tokens=len(pinned.block_ids) * self._store.shape.block_size,
            num_blocks=len(pinned.block_ids),
            last_block_hash=hashes[len(pinned.block_ids) - 1] if pinned.block_ids else None,
            first_tokens=(),
            prefix=pinned.prefix,
        )
        try:
            # A puller that gets fewer blocks than it wants has no room for the windows of these.
            windows = pinned.windows if len(pinned.block_ids) == len(hashes) else NO_WINDOWS
            return self._table.grant(pinned.block_ids, manifest, unpin, windows)
        except Overloaded:
            unpin()
            raise

    def _hashes(self, opened: pb.OpenFetch) -> BlockHashes:
        num_bytes = len(opened.block_hashes)
        if not num_bytes or num_bytes % HASH_BYTES:
            raise InvalidRequest(
                f"has {num_bytes} bytes and there is no handoff id; send one, or hashes of {HASH_BYTES} bytes",
                field="block_hashes",
            )
        return BlockHashes(opened.block_hashes)[: self._store.num_blocks]

    def _check(self, opened: pb.OpenFetch) -> None:
        if opened.epoch != self._settings.epoch():
            raise StaleEpoch("this worker was restarted, or has changed its role; its handoffs are gone")
        if opened.layout_fingerprint != self._store.shape.fingerprint:
            raise LayoutMismatch(f"layout {opened.layout_fingerprint} is not {self._store.shape.fingerprint}, as here")

    async def _stream(self, handoff: Handoff, opened: pb.OpenFetch, puller: PullerStream) -> None:
        transport = self._settings.transports.choose(opened)
        reply = pb.FetchOpened(transport=worker_pb2.KvTransport.ValueType(transport.number))
        transport.describe(reply)
        staging = None if self._settings.offloaded is None else self._settings.offloaded.staging
        if staging is not None and opened.hash_root and self._settings.transports.can_stage(opened):
            reply.offloaded_memory.CopyFrom(staging)
        await puller.write([pb.FetchBlocksResponse(opened=reply)])
        next_block = opened.first_block
        while True:
            handoff.raise_if_aborted()
            ready = handoff.num_ready_blocks
            if ready > next_block:
                await self._send(handoff, handoff.block_table[next_block:ready], next_block, transport, puller)
                next_block = ready
            elif handoff.manifest is not None:
                num_present = max(0, opened.first_block - handoff.windows.first_block)
                missing = handoff.windows.ids[num_present:]
                await self._send(handoff, missing, len(handoff.block_table) + num_present, transport, puller)
                break
            else:
                await handoff.changed()
        is_staged = reply.HasField("offloaded_memory")
        manifest = await self._send_offloaded(handoff, opened, puller, is_staged=is_staged)
        sent = self._manifest(manifest, age_s=self._table.age_s(handoff))
        await puller.write([pb.FetchBlocksResponse(manifest=sent)])

    async def _send_offloaded(
        self, handoff: Handoff, opened: pb.OpenFetch, puller: PullerStream, *, is_staged: bool
    ) -> HandoffManifest:
        """Send blocks that are outside the pages, behind those that the puller has by now; returns what it has then."""
        manifest, offloaded = handoff.manifest, self._settings.offloaded
        assert manifest is not None, "the pages were sent"
        if opened.handoff_id or not opened.hash_root or offloaded is None:
            return manifest
        hashes, root = self._hashes(opened), HashRoot(opened.hash_root)
        via = TRANSPORT_NUMBERS[SharedMemory.name if is_staged else GrpcChunks.name]
        first = end = max(manifest.num_blocks, opened.first_block)
        num_held = offloaded.num_held(hashes, first)

        def wanted(first_block: int) -> OffloadedBlocks:
            return OffloadedBlocks(
                puller=_caller_name(),
                first_block=first_block,
                hashes=hashes[first_block:num_held],
                root=root,
                chunk_bytes=self._settings.chunk_bytes,
                is_staged=is_staged,
            )

        async with ReadAhead(offloaded, timeout_s=self._settings.lease_ttl_s) as reads:
            if end < num_held:
                reads.begin(wanted(end))
            while end < num_held and (piece := await reads.next()).num_blocks:
                handoff.raise_if_aborted()
                end += piece.num_blocks
                if end < num_held:
                    reads.begin(wanted(end))
                await puller.write(piece.messages)
                if is_staged:
                    await puller.taken()
                self._on_bytes(via, piece.num_blocks * self._store.shape.block_bytes)
        if end == first:
            return manifest
        return replace(
            manifest,
            num_tokens=end * self._store.shape.block_size,
            num_blocks=end,
            last_block_hash=hashes[end - 1],
            offloaded_wait_s=reads.waited_s,
        )

    async def _send(
        self,
        handoff: Handoff,
        page_ids: tuple[BlockId, ...],
        first_index: int,
        transport: Transport,
        puller: PullerStream,
    ) -> None:
        """Send pages of one kind, the first of which has this index among the sequence's blocks, then window pages."""
        if not page_ids:
            return
        page_bytes = page_bytes_of(self._store, page_ids)
        stride = max(1, PIECE_BYTES // page_bytes) if transport.reads_pages else len(page_ids)
        with transport.lending() or nullcontext() as lending:
            for first in range(0, len(page_ids), stride):
                some = page_ids[first : first + stride]
                seal = transport.seal if lending is None else await self._lend(lending, puller)
                if transport.reads_pages:
                    messages = await to_end(seal, first_index + first, some)
                    handoff.raise_if_aborted()  # the pages may have had a new owner while they were read
                else:
                    messages = seal(first_index + first, some)
                await puller.write(messages)
                self._on_bytes(transport.number, len(some) * page_bytes)
            while lending is not None and lending.num_lent:  # a transfer that waits for its prefill holds no slots
                await self._take_back(lending, puller)

    async def _lend(self, lending: Lending, puller: PullerStream) -> Seal:
        """Return what fills the next slot, when there is one."""
        if lending.is_full:
            await self._take_back(lending, puller)
        try:
            async with asyncio.timeout(self._settings.lease_ttl_s):
                return await lending.lend()
        except TimeoutError:
            raise HandoffGone("other transfers have all slots of the ring") from None

    async def _take_back(self, lending: Lending, puller: PullerStream) -> None:
        await puller.taken()
        lending.take_back()

    def _manifest(self, manifest: HandoffManifest, *, age_s: float) -> pb.Manifest:
        return message_of(
            pb.Manifest,
            manifest,
            last_block_hash=manifest.last_block_hash or b"",
            first_tokens=[message_of(pb.ManifestToken, token) for token in manifest.first_tokens],
            age_s=age_s,
            tokens=pack_tokens(manifest.prefix.token_ids) if manifest.prefix is not None else b"",
            hash_root=manifest.prefix.root if manifest.prefix is not None else b"",
        )


def _caller_name() -> str:
    """Return the peer that the running call serves; empty where nothing guards the listener."""
    try:
        return caller().name
    except LookupError:
        return ""


def check_by(credentials: Credentials) -> CheckPull:
    """Return a worker's check of tickets against the puller and its request; for calls behind a `Guard`."""

    def check(source: WorkerId, opened: pb.OpenFetch) -> None:
        identity = caller()
        is_handoff = bool(opened.handoff_id)
        right = PullRight(
            puller=WorkerId(identity.name),
            source=source,
            epoch=Epoch(opened.epoch),
            subject=of_handoff(HandoffId(opened.handoff_id)) if is_handoff else of_blocks(opened.block_hashes),
        )
        check_ticket(opened.ticket, right, caller=identity, verifier=credentials.held.verifier)

    return check
