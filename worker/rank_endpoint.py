"""Listener and puller of one rank of a vLLM server, on a thread of their own.

Built of the parts by which our workers hand KV over: leases, manifests, checksums, transports. A transfer either ends
with verified pages or is reported as failed; vLLM then computes the prompt itself.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import grpc

from common.clock import SystemClock
from common.errors import AccessDenied, DeadlineExceeded, KvrelayError
from common.ids import WorkerId, mint_epoch
from common.ports import address_of, is_loopback, listening_address
from common.rpc import MIN_PING_INTERVAL_MS, MalformedRequestInterceptor, channel_options
from engine.vllm.connector.endpoint import Ready
from engine.vllm.connector.orders import Chunk, Offer, Pull, RankAddress, RankResults
from engine.vllm.connector.pages import RankPages
from engine.vllm.connector.routes import RankPlace, Route, routes
from kv_transfer.handoff import HandoffTable
from kv_transfer.pull import KvPuller, Pulled, PullPlan
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import kv_transfer_pb2_grpc
from worker.connector_config import ConnectorConfig, Tls
from worker.rank_offers import RankOffers, part_id

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_NUM_COPIERS = 2
_START_S = 30.0


class RankEndpoint:
    """Transfers of one rank; an `Endpoint`. Its tables belong to the thread of its event loop."""

    def __init__(self, pages: RankPages, config: ConnectorConfig, place: RankPlace) -> None:
        """Listen. Raises ValueError and OSError, naming the address or the file."""
        self._pages = pages
        self._config = config
        self._place = place
        self._tls = Tls.of(config.tls_dir) if config.tls_dir is not None else None
        if self._tls is None and not is_loopback(config.host):
            raise ValueError(
                f"cannot listen on {config.host} without TLS: other hosts could read along; set tls_dir in"
                " kv_connector_extra_config"
            )
        self._epoch = mint_epoch()
        # What it counts are pieces, not tokens: a chunk makes whole ones ready.
        self._table = HandoffTable(block_size=1, lease_ttl_s=config.lease_ttl_s, clock=SystemClock())
        self._transports = WorkerTransports.configured(config, pages)
        self._puller = KvPuller(
            store=pages,
            transports=self._transports,
            clock=SystemClock(),
            on_bytes=lambda _transport, _count: None,
            on_pull=lambda *_timed: None,
        )
        self._offers = RankOffers(self._table, pages, place)
        self._pulls: dict[str, asyncio.Task[list[Pulled]]] = {}
        """Pulls by request id."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """All tasks, pulls included."""
        self._ended = threading.Condition()
        """Guards the results and the number of open transfers."""
        self._results = RankResults.none()
        self._num_open = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_NUM_COPIERS))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay transfers", daemon=True)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)

    def begin(self, offer: Offer) -> None:
        """See `Endpoint`."""
        self._loop.call_soon_threadsafe(self._offers.begin, offer)

    def add(self, chunk: Chunk, ready: Ready | None) -> None:
        """See `Endpoint`."""
        self._loop.call_soon_threadsafe(lambda: self._run(self._offers.copy(chunk, ready)))

    def end(self, request_ids: Collection[str]) -> None:
        """See `Endpoint`."""

        def end() -> None:
            for request_id in request_ids:
                self._run(self._offers.end(request_id), partial(self._offer_ended, request_id))

        self._open_transfers(len(request_ids))
        self._loop.call_soon_threadsafe(end)

    def settle(self, request_ids: Collection[str]) -> None:
        """See `Endpoint`."""
        asyncio.run_coroutine_threadsafe(self._offers.settle(request_ids), self._loop).result()

    def pull(self, pull: Pull, ready: Ready | None) -> None:
        """See `Endpoint`."""

        def begin() -> None:
            self._pulls[pull.request_id] = self._run(self._pull(pull, ready), partial(self._pulled, pull))

        self._open_transfers(1)
        self._loop.call_soon_threadsafe(begin)

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Endpoint`."""
        if request_ids:
            self._loop.call_soon_threadsafe(self._cancel, tuple(request_ids))

    def take_results(self, wait_s: float = 0.0) -> RankResults:
        """See `Endpoint`."""
        with self._ended:
            if wait_s and self._num_open:
                self._ended.wait_for(lambda: self._results.offered or self._results.pulled, wait_s)
            taken = self._results
            self._results = RankResults.none()
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
                worker_id=WorkerId(f"rank-{self._place.rank}"),
                epoch=lambda: self._epoch,
                transports=self._transports,
                lease_ttl_s=config.lease_ttl_s,
                check_pull=lambda _source, _opened: None,  # the handoff's id is the right to fetch it
            ),
            track=nullcontext,
            on_bytes=lambda _transport, _count: None,
        )
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, self._server)
        address = address_of(listening_address(config.host), config.port and config.port + self._place.rank)
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._tls.server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        self._run(self._sweep())
        return RankAddress(address=address_of(config.host, bound), epoch=self._epoch)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 4)
            before = self._table.num_expired
            self._table.sweep()
            if num_expired := self._table.num_expired - before:
                with self._ended:
                    self._results.count("expired", num_expired)

    async def _stop(self) -> None:
        await self._server.stop(None)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(
        self, work: Coroutine[Any, Any, _T], ended: Callable[[asyncio.Task[_T]], None] | None = None
    ) -> asyncio.Task[_T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if ended is not None:
            task.add_done_callback(ended)
        return task

    def _offer_ended(self, request_id: str, task: "asyncio.Task[bool]") -> None:
        with self._ended:
            self._results.offered.add(request_id)
            self._close_transfer()
            if not task.cancelled() and not task.result():
                self._results.count("failed_offers")

    def _open_transfers(self, count: int) -> None:
        with self._ended:
            self._num_open += count

    def _close_transfer(self) -> None:
        self._num_open -= 1
        self._ended.notify_all()

    async def _pull(self, pull: Pull, ready: Ready | None) -> list[Pulled]:
        if ready is not None:
            await self._loop.run_in_executor(None, ready.synchronize)
        place, source = self._place, pull.source
        try:
            async with asyncio.timeout(self._config.pull_timeout_s), asyncio.TaskGroup() as group:
                parts = [
                    group.create_task(self._pull_part(pull, route))
                    for route in routes(place.num_heads, num_sources=len(source.ranks), num_pullers=place.num_ranks)
                    if route.puller == place.rank
                ]
        except TimeoutError:
            raise DeadlineExceeded(f"it has taken more than pull_timeout_s, {self._config.pull_timeout_s} s") from None
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [part.result() for part in parts]

    async def _pull_part(self, pull: Pull, route: Route) -> Pulled:
        source, num_heads = pull.source.ranks[route.source], len(route.heads)
        if self._tls is None and not is_loopback(source.address.rpartition(":")[0]):
            raise AccessDenied(
                f"{source.address} is another host, and there is no tls_dir in kv_connector_extra_config"
            )
        plan = PullPlan(
            peer=WorkerId(source.address),
            epoch=source.epoch,
            wanted=WantedHandoff(
                handoff_id=part_id(pull.source.handoff_id, route.puller),
                num_tokens=pull.prompt.num_tokens,
                num_blocks=pull.prompt.num_blocks * num_heads,
                last_block_hash=pull.prompt.last_hash,
                num_samples=0,
                first_sample_index=0,
            ),
            block_table=self._pages.pieces(pull.block_ids, self._place.own(route.heads)),
            first_block=pull.first_block * num_heads,
            ticket="",
        )
        async with self._channel(source.address) as channel:
            return await self._puller.pull(plan, channel)

    def _pulled(self, pull: Pull, task: "asyncio.Task[list[Pulled]]") -> None:
        del self._pulls[pull.request_id]
        reason = _failure(task)
        with self._ended:
            self._results.pulled.add(pull.request_id)
            self._close_transfer()
            if reason is None:
                self._results.count("pulls")
                self._results.count("pulled_bytes", sum(part.kv_bytes for part in task.result()))
                self._results.count("exposed_seconds", max(part.exposed_s for part in task.result()))
                return
            self._results.count("failed_pulls")
            self._results.invalid_blocks.update(pull.block_ids[pull.first_block :])
        logger.warning("cannot pull the prompt of %s: %s", pull.request_id, reason)

    def _cancel(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if (task := self._pulls.get(request_id)) is not None:
                task.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        options = channel_options()
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls.channel(), options=options)


def _failure(task: "asyncio.Task[Any]") -> str | None:
    """Return why a task has failed; None when it has not."""
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return None
    if not isinstance(error, KvrelayError):
        logger.debug("a transfer has failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
