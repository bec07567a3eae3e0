"""Measures how fast each transport moves KV between pages of one host: no pull of this worker is faster.

A worker pulls some of its own pages through the code that serves and pulls, over a socket that only its user reaches,
without encryption. A network between two hosts can only be slower.
"""

import logging
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import grpc

from common.clock import SystemClock
from common.config import TransferConfig
from common.errors import KvrelayError
from common.ids import BlockId, WorkerId, mint_epoch, mint_handoff_id
from common.rpc import channel_options, unix_address
from engine.device.shared_memory import host_id
from engine.kv_store import KvStore
from engine.thread import EngineDriver
from kv_transfer.handoff import HandoffManifest, HandoffTable
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import TRANSPORTS, WorkerTransports
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc

logger = logging.getLogger(__name__)

_MAX_BYTES = 32 << 20
_MIN_BYTES = 1 << 20
"""Bytes below which latency is most of a pull: no rate is reported then."""
_NUM_PULLS = 3
_LEASE_TTL_S = 10.0


async def measure_link_rates(config: TransferConfig, store: KvStore, *, engine: EngineDriver) -> Mapping[int, float]:
    """Return bytes per second by number of the transport, in some tenths of a second, before any page is in use.

    Overwrites pages. Transports that cannot be measured, or fail, are left out: best effort, never fails the worker.
    """
    num_blocks = min(store.num_blocks // 2, _MAX_BYTES // store.shape.block_bytes)
    rates: dict[int, float] = {}
    if num_blocks * store.shape.block_bytes < _MIN_BYTES:
        return rates
    for name in config.transports:
        if not TRANSPORTS[name].pulls_from_itself:
            continue
        try:
            transport = TRANSPORTS[name](store, config)
            if transport.reaches(pb.OpenFetch(host_id=host_id())):
                rates[transport.number] = await _measure(WorkerTransports([transport]), store, num_blocks, engine)
        except (KvrelayError, grpc.RpcError, OSError, RuntimeError) as error:
            logger.warning("cannot measure the link %s: %s; it is known after the first pulls", name, error)
    return rates


async def _measure(transports: WorkerTransports, store: KvStore, num_blocks: int, engine: EngineDriver) -> float:
    """Return the bytes per second of the fastest of some pulls."""
    worker_id, epoch, clock = WorkerId("itself"), mint_epoch(), SystemClock()
    table = HandoffTable(block_size=store.shape.block_size, lease_ttl_s=_LEASE_TTL_S, clock=clock)
    service = KvTransferService(
        table=table,
        engine=engine,
        store=store,
        settings=ServeSettings(
            worker_id=worker_id,
            epoch=lambda: epoch,
            transports=transports,
            lease_ttl_s=_LEASE_TTL_S,
            check_pull=lambda _source, _opened: None,
        ),
        track=nullcontext,
        on_bytes=lambda _transport, _num_bytes: None,
    )
    puller = KvPuller(
        store=store,
        transports=transports,
        clock=clock,
        on_bytes=lambda _transport, _num_bytes: None,
        on_pull=lambda _peer, _transport, _num_bytes, _seconds: None,
    )
    num_tokens = num_blocks * store.shape.block_size
    manifest = HandoffManifest(num_tokens=num_tokens, num_blocks=num_blocks, last_block_hash=None, first_tokens=())
    blocks = tuple(map(BlockId, range(num_blocks)))
    async with AsyncExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-"))
        server = grpc.aio.server(options=channel_options())
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, server)
        address = held.enter_context(unix_address(Path(folder) / "kv"))
        server.add_insecure_port(address)
        await server.start()
        held.push_async_callback(server.stop, None)
        channel = await held.enter_async_context(grpc.aio.insecure_channel(address, options=channel_options()))
        fastest_s = float("inf")
        for _ in range(_NUM_PULLS):
            handoff = table.begin(mint_handoff_id(), lambda: None)
            table.progress(handoff, blocks, num_tokens)
            table.complete(handoff, manifest)
            plan = PullPlan(
                peer=worker_id,
                epoch=epoch,
                wanted=WantedHandoff(
                    handoff_id=handoff.handoff_id,
                    num_tokens=num_tokens,
                    num_blocks=num_blocks,
                    last_block_hash=None,
                    num_samples=0,
                    first_sample_index=0,
                ),
                block_table=tuple(BlockId(num_blocks + block) for block in blocks),
                first_block=0,
                ticket="",
            )
            started_s = clock.monotonic()
            await puller.pull(plan, channel)
            fastest_s = min(fastest_s, clock.monotonic() - started_s)
    return num_blocks * store.shape.block_bytes / fastest_s
