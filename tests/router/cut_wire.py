"""A TCP connection between a router and a worker that can be cut in either direction, without a word to the ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.trust.identity import Role
from common.trust.proofs import audience_of
from kvrelay.v1 import router_admin_pb2
from tests.router.fake_worker import FakeWorker

_CHUNK = 1 << 16


class CutWire:
    """Forwards bytes to a worker and back until it is cut."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._is_open = {"to_worker": asyncio.Event(), "to_router": asyncio.Event()}
        self.port = 0

    @property
    def endpoint(self) -> router_admin_pb2.WorkerEndpoint:
        """The worker, as reached over this wire."""
        endpoint = self._worker.endpoint
        endpoint.address = f"127.0.0.1:{self.port}"
        return endpoint

    def cut(self, *directions: str) -> None:
        """Drop what is sent in these directions, by never reading it."""
        for direction in directions:
            self._is_open[direction].clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["CutWire"]:
        """Listen on a free port inside the block."""
        for is_open in self._is_open.values():
            is_open.set()
        pumping: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._worker.port)
            for direction, source, target in (("to_worker", reader, far_writer), ("to_router", far_reader, writer)):
                pumping.add(asyncio.create_task(self._pump(self._is_open[direction], source, target)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        assert self._worker.guard is not None, "the worker listens"
        # A caller proves its identity for the address that it calls, which is that of the wire.
        self._worker.guard._proof_audience = audience_of(Role.WORKER, f"127.0.0.1:{self.port}")  # noqa: SLF001 - as above
        try:
            yield self
        finally:
            server.close()
            for task in pumping:
                task.cancel()
            await asyncio.gather(*pumping, return_exceptions=True)

    async def _pump(self, is_open: asyncio.Event, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_CHUNK):
                await is_open.wait()
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()
