"""Certificates are renewed under running calls; new connections show and ask for the newest one."""

import asyncio
import http.client
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from common.metrics_server import MetricsServer
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.authority import Authority
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.doors import FileDoor, scrape_tls
from common.trust.guard import Guard
from common.trust.identity import Role, server_name
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from tests.security.listeners import HOSTS, authority


class Talker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends one update for each `say`."""

    def __init__(self) -> None:
        self.say: asyncio.Queue[int] = asyncio.Queue()

    async def WatchWorker(self, request: Any, context: Any) -> None:  # type: ignore[override]
        while True:
            await context.write(worker_pb2.WatchWorkerResponse(seq=await self.say.get()))

    async def DescribeWorker(self, request: Any, context: Any) -> worker_pb2.DescribeWorkerResponse:
        shown = context.auth_context().get("x509_pem_cert", [b""])[0]
        return worker_pb2.DescribeWorkerResponse(hash_probe=shown)


def serial_of(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


def renew(credentials: Credentials, own: Authority, role: Role, name: str) -> int:
    """Renew and return the new serial number."""
    credentials.renew(lambda request: own.enrol(request, role=role, name=name), HOSTS)
    return serial_of(credentials.held.certificate_pem)


@asynccontextmanager
async def serving(own: Authority, talker: Talker) -> AsyncIterator[tuple[Any, Credentials]]:
    mine = Credentials.of(own, Role.WORKER, "decode-0", HOSTS)

    def add(server: grpc.aio.Server) -> list[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(talker, server)
        return []

    server = await start_server(add, host="127.0.0.1", port=0, guard=Guard(mine, Audience.INSIDERS))
    try:
        yield server, mine
    finally:
        await server.stop(0)


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_stream_survives_renewals_and_new_calls_show_the_new_certificate(
    is_encrypted: bool,
) -> None:
    own, talker = authority(is_encrypted=is_encrypted), Talker()  # type: ignore[abstract]
    caller = Credentials.of(own, Role.ROUTER, "router-0", HOSTS)
    async with (
        asyncio.timeout(60),
        serving(own, talker) as (server, mine),
        connect_to(Role.WORKER, caller)(f"127.0.0.1:{server.port}") as channel,
    ):
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.WatchWorker(worker_pb2.WatchWorkerRequest())
        for number in range(3):
            talker.say.put_nowait(number)
            assert (await stream.read()).seq == number
            renew(mine, own, Role.WORKER, "decode-0")
            newest = renew(caller, own, Role.ROUTER, "router-0")
            described = await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest())
            if is_encrypted:
                assert serial_of(described.hash_probe) == newest
        talker.say.put_nowait(9)
        assert (await stream.read()).seq == 9, "on the connection that it began on"
        stream.cancel()


async def test_certificate_that_has_expired_opens_no_connection() -> None:
    own, talker = authority(is_encrypted=True), Talker()  # type: ignore[abstract]
    async with serving(own, talker) as (server, _mine):
        own.settings = replace(own.settings, lifetime_s=-60.0)
        caller = Credentials.of(own, Role.ROUTER, "router-0", HOSTS)
        async with connect_to(Role.WORKER, caller)(f"127.0.0.1:{server.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker_pb2_grpc.WorkerServiceStub(channel).DescribeWorker(worker_pb2.DescribeWorkerRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def shown_by(context: ssl.SSLContext) -> int:
    """Return the serial number that a server with this context shows in a handshake."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def write_pair(folder: Path, own: Authority) -> int:
    """Write a new certificate of an operator's own; returns its serial number."""
    theirs = Credentials.of(own, Role.CLIENT, "door", HOSTS)
    (folder / "door.pem").write_bytes(theirs.held.certificate_pem)
    (folder / "door.key").write_bytes(theirs.held.key_pem)
    return serial_of(theirs.held.certificate_pem)


def test_operators_files_that_do_not_fit_together_stop_the_start(tmp_path: Path) -> None:
    own = authority(is_encrypted=True)
    write_pair(tmp_path, own)
    other = Credentials.of(own, Role.CLIENT, "other", HOSTS)
    (tmp_path / "door.key").write_bytes(other.held.key_pem)
    with pytest.raises(ssl.SSLError):
        FileDoor(tmp_path / "door.pem", tmp_path / "door.key")


async def test_metrics_are_told_to_operators_only(tmp_path: Path) -> None:
    own = authority(is_encrypted=True)
    tls = scrape_tls(Credentials.of(own, Role.WORKER, "decode-0", HOSTS))
    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, tls=tls)

    def scrape(caller: Credentials | None) -> int:
        context = ssl.create_default_context(cadata=own.ca_pem.decode())
        if caller is not None:
            pem = tmp_path / "caller.pem"
            pem.write_bytes(caller.held.key_pem + caller.held.certificate_pem)
            context.load_cert_chain(pem)
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        try:
            name = server_name("test", Role.WORKER)
            connection.sock = context.wrap_socket(plain, server_hostname=name)
            connection.request("GET", "/metrics")
            return connection.getresponse().status
        finally:
            connection.close()

    assert await asyncio.to_thread(scrape, Credentials.of(own, Role.OPERATOR, "operator")) == 200
    for caller in (None, Credentials.of(own, Role.WORKER, "decode-1")):
        with pytest.raises(OSError):  # broken off: a client without a certificate hears of it when it reads
            await asyncio.to_thread(scrape, caller)
    await asyncio.to_thread(server.close)
