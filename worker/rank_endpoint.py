"""Listener and puller of one rank of a vLLM server, on a thread of their own.

Built of the parts by which our workers hand KV over: leases, manifests, checksums, transports. A transfer either ends
with verified pages or is reported as failed; vLLM then computes the prompt itself.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import torch
from pydantic import Field

from common.clock import SystemClock
from common.config import TransferConfig
from common.config.keys import Port
from common.config.workers import TransportName
from common.errors import AccessDenied, DeadlineExceeded, EngineFault, KvrelayError
from common.ids import WorkerId, mint_epoch
from common.ports import address_of, is_loopback, listening_address
from common.rpc import MIN_PING_INTERVAL_MS, MalformedRequestInterceptor, channel_options
from engine.vllm.connector.orders import Offer, Pull, RankAddress, RankResults
from engine.vllm.connector.pages import RankPages
from kv_transfer.handoff import HandoffManifest, HandoffTable
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import kv_transfer_pb2_grpc

logger = logging.getLogger(__name__)

_NUM_COPIERS = 2
_START_S = 30.0


class ConnectorConfig(TransferConfig):
    """Keys of `kv_connector_extra_config`."""

    transports: tuple[TransportName, ...] = ("shm", "grpc")
    host: str = "127.0.0.1"
    """Name or address of this host, by which other servers reach it."""
    port: Port = 0
    """Port of rank 0, further ranks have the next ones; 0 takes free ones."""
    ring_mib: Annotated[int, Field(gt=0)] = 1024
    """Host memory for offered pages, per rank; it is taken as it is used."""
    pull_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a pull is given up and the prompt computed here."""
    tls_dir: Path | None = None
    """Folder of ca.pem, cert.pem and key.pem; both sides of a transfer show a certificate of that authority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tls:
    """Certificates by which two servers know each other."""

    ca: bytes
    cert: bytes
    key: bytes

    @classmethod
    def of(cls, folder: Path) -> "_Tls":
        """Read the files of a folder. Raises OSError."""
        ca, cert, key = ((folder / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key"))
        return cls(ca=ca, cert=cert, key=key)

    def server(self) -> grpc.ServerCredentials:
        """Return the credentials of a listener, which asks for a certificate."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class RankEndpoint:
    """Transfers of one rank; an `Endpoint`. Its tables belong to the thread of its event loop."""

    def __init__(self, pages: RankPages, config: ConnectorConfig, *, rank: int) -> None:
        """Listen. Raises ValueError and OSError, naming the address or the file."""
        self._pages = pages
        self._config = config
        self._rank = rank
        self._tls = _Tls.of(config.tls_dir) if config.tls_dir is not None else None
        if self._tls is None and not is_loopback(config.host):
            raise ValueError(
                f"cannot listen on {config.host} without TLS: other hosts could read along; set tls_dir in"
                " kv_connector_extra_config"
            )
        self._epoch = mint_epoch()
        self._table = HandoffTable(
            block_size=pages.shape.block_size, lease_ttl_s=config.lease_ttl_s, clock=SystemClock()
        )
        self._transports = WorkerTransports.configured(config, pages)
        self._puller = KvPuller(
            store=pages,
            transports=self._transports,
            clock=SystemClock(),
            on_bytes=lambda _transport, _count: None,
            on_pull=lambda *_timed: None,
        )
        self._pulls: dict[str, asyncio.Task[None]] = {}
        """Pulls by request id."""
        self._tasks: set[asyncio.Task[None]] = set()
        """All tasks, pulls included."""
        self._lock = threading.Lock()
        self._results = RankResults(offered=set(), pulled=set(), invalid_blocks=set())
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_NUM_COPIERS))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay transfers", daemon=True)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)

    def offer(self, offer: Offer) -> None:
        """See `Endpoint`."""
        self._loop.call_soon_threadsafe(lambda: self._run(self._offer(offer), partial(self._offered, offer)))

    def pull(self, pull: Pull, ready: torch.Event | None) -> None:
        """See `Endpoint`."""

        def begin() -> None:
            self._pulls[pull.request_id] = self._run(self._pull(pull, ready), partial(self._pulled, pull))

        self._loop.call_soon_threadsafe(begin)

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Endpoint`."""
        if request_ids:
            self._loop.call_soon_threadsafe(self._cancel, tuple(request_ids))

    def take_results(self) -> RankResults:
        """See `Endpoint`."""
        with self._lock:
            taken = self._results
            self._results = RankResults(offered=set(), pulled=set(), invalid_blocks=set())
        return taken

    def close(self) -> None:
        """See `Endpoint`."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> RankAddress:
        config = self._config
        options = [
            *channel_options(),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options, interceptors=[MalformedRequestInterceptor()])
        service = KvTransferService(
            table=self._table,
            engine=None,
            store=self._pages,
            settings=ServeSettings(
                worker_id=WorkerId(f"rank-{self._rank}"),
                epoch=lambda: self._epoch,
                transports=self._transports,
                lease_ttl_s=config.lease_ttl_s,
                check_pull=lambda _source, _opened: None,  # the handoff's id is the right to fetch it
            ),
            track=nullcontext,
            on_bytes=lambda _transport, _count: None,
        )
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, self._server)
        address = address_of(listening_address(config.host), config.port and config.port + self._rank)
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._tls.server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        self._run(self._sweep(), lambda _task: None)
        return RankAddress(address=address_of(config.host, bound), epoch=self._epoch)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 4)
            self._table.sweep()

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(None)

    def _run(self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)
        return task

    async def _offer(self, offer: Offer) -> None:
        pages = offer.pages
        slots = self._pages.take_slots(len(pages.block_ids))
        try:
            await self._loop.run_in_executor(None, self._pages.stage, pages.block_ids, slots)
            handoff = self._table.begin(offer.handoff_id, lambda: self._pages.free_slots(slots))
        except BaseException:
            self._pages.free_slots(slots)
            raise
        self._table.progress(handoff, slots, pages.num_tokens)
        manifest = HandoffManifest(
            num_tokens=pages.num_tokens, num_blocks=len(slots), last_block_hash=pages.last_hash, first_tokens=()
        )
        self._table.complete(handoff, manifest)

    def _offered(self, offer: Offer, task: "asyncio.Task[None]") -> None:
        if (reason := _failure(task)) is not None:
            logger.warning("cannot offer the prompt of %s: %s", offer.request_id, reason)
            with suppress(KvrelayError):  # the puller has come and left
                self._table.abort(self._table.begin(offer.handoff_id, lambda: None), EngineFault(reason))
        with self._lock:
            self._results.offered.add(offer.request_id)

    async def _pull(self, pull: Pull, ready: torch.Event | None) -> None:
        source = pull.source.ranks[self._rank]
        if self._tls is None and not is_loopback(source.address.rpartition(":")[0]):
            raise AccessDenied(
                f"{source.address} is another host, and there is no tls_dir in kv_connector_extra_config"
            )
        plan = PullPlan(
            peer=WorkerId(source.address),
            epoch=source.epoch,
            wanted=WantedHandoff(
                handoff_id=pull.source.handoff_id,
                num_tokens=pull.pages.num_tokens,
                num_blocks=len(pull.pages.block_ids),
                last_block_hash=pull.pages.last_hash,
                num_samples=0,
                first_sample_index=0,
            ),
            block_table=pull.pages.block_ids,
            first_block=pull.first_block,
            ticket="",
        )
        if ready is not None:
            await self._loop.run_in_executor(None, ready.synchronize)
        try:
            async with asyncio.timeout(self._config.pull_timeout_s), self._channel(source.address) as channel:
                await self._puller.pull(plan, channel)
        except TimeoutError:
            raise DeadlineExceeded(f"it has taken more than pull_timeout_s, {self._config.pull_timeout_s} s") from None

    def _pulled(self, pull: Pull, task: "asyncio.Task[None]") -> None:
        del self._pulls[pull.request_id]
        reason = _failure(task)
        if reason is not None:
            logger.warning("cannot pull the prompt of %s: %s", pull.request_id, reason)
        with self._lock:
            if reason is not None:
                self._results.invalid_blocks.update(pull.pages.block_ids[pull.first_block :])
            self._results.pulled.add(pull.request_id)

    def _cancel(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if (task := self._pulls.get(request_id)) is not None:
                task.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        options = channel_options()
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls.channel(), options=options)


def _failure(task: "asyncio.Task[None]") -> str | None:
    """Return why a task has failed; None when it has not."""
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return None
    if not isinstance(error, KvrelayError):
        logger.debug("a transfer has failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
