"""A caller that is no member, or has another role, gets nothing from an inside listener, with or without TLS."""

import base64
import datetime
import json
import ssl
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import jwt
import pytest
import pytest_asyncio

from common.errors import Unauthenticated
from common.rpc import client_channel
from common.trust import guard, proofs
from common.trust.access import METHODS
from common.trust.channels import connect_to
from common.trust.credentials import Credentials
from common.trust.identity import Role, server_name
from common.trust.proofs import METADATA_KEY, audience_of
from tests.security.listeners import HOSTS, Listeners, authority, listeners, status_of
from tests.trust import credentials_of

DENIED, UNKNOWN, NO_WAY = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
)
HEALTH = "/grpc.health.v1.Health/Check"
LISTENER_OF = {
    "WorkerService": "control",
    "PrefillService": "control",
    "DecodeService": "control",
    "PrefixService": "control",
    "KvTransferService": "kv",
    "RouterAdminService": "admin",
}
INSIDE = sorted(method for method in METHODS if method.split(".")[-1].split("/")[0] in LISTENER_OF)


def listener_of(method: str) -> str:
    return LISTENER_OF[method.split(".")[-1].split("/")[0]]


@pytest_asyncio.fixture(params=[False, True], ids=["plain", "tls"])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Listeners]:
    async with listeners(is_encrypted=request.param) as found:
        yield found


def test_every_inside_method_is_tried() -> None:
    assert {method for method, roles in METHODS.items() if Role.CLIENT not in roles} - set(INSIDE) == {
        method for method in METHODS if "ControllerService" in method
    }


async def test_member_with_another_role_is_denied_each_method_and_its_handler_never_runs(target: Listeners) -> None:
    for role in (Role.CLIENT, Role.ROUTER, Role.WORKER, Role.CONTROLLER, Role.OPERATOR):
        caller = target.credentials(role)
        for name, (address, served_by) in target.inside.items():
            async with target.channel(address, served_by, caller) as channel:
                for method in (method for method in INSIDE if listener_of(method) == name):
                    is_allowed = role in METHODS[method]  # such a call may last for ever
                    code, details = await status_of(channel, method, timeout_s=0.3 if is_allowed else 60.0)
                    if is_allowed:
                        assert code not in (DENIED, UNKNOWN), (role, method, details)
                    else:
                        assert (code, details) == (DENIED, f"cannot call {method}: a {role} may not")
    assert target.worker.runtime.num_request_tasks == 0
    assert target.router.fleet.members == ()


async def test_stranger_without_anything_to_show_is_refused_each_method(target: Listeners) -> None:
    is_encrypted = target.authority.settings.is_encrypted
    for name, (address, _served_by) in target.inside.items():
        tls = grpc.ssl_channel_credentials(target.authority.ca_pem)
        options = [("grpc.ssl_target_name_override", "127.0.0.1")]
        make = grpc.aio.secure_channel(address, tls, options) if is_encrypted else grpc.aio.insecure_channel(address)
        async with make as channel:
            for method in [*(method for method in INSIDE if listener_of(method) == name), HEALTH]:
                code, details = await status_of(channel, method)
                assert code is (NO_WAY if is_encrypted else UNKNOWN), (method, details)


async def test_party_of_another_cluster_is_refused_each_method(target: Listeners) -> None:
    is_encrypted = target.authority.settings.is_encrypted
    for cluster in ("test", "other"):  # a cluster's name alone opens nothing
        foreign = authority(is_encrypted=is_encrypted, cluster=cluster)
        for role in (Role.ROUTER, Role.WORKER, Role.CONTROLLER):
            caller = Credentials.of(foreign, role, "somebody", HOSTS)
            for name, (address, served_by) in target.inside.items():
                async with connect_to(served_by, caller)(address) as channel:
                    method = next(each for each in INSIDE if listener_of(each) == name)
                    code, _details = await status_of(channel, method)
                    assert code is (NO_WAY if is_encrypted else UNKNOWN), (role, name)


async def test_plain_text_and_tls_do_not_meet(target: Listeners) -> None:
    is_encrypted = target.authority.settings.is_encrypted
    other = authority(is_encrypted=not is_encrypted)
    for address, served_by in target.inside.values():
        async with connect_to(served_by, Credentials.of(other, Role.CONTROLLER, "c", HOSTS))(address) as channel:
            code, _details = await status_of(channel, HEALTH)
            assert code in (NO_WAY, UNKNOWN)


async def test_services_of_one_listener_are_not_served_on_another(target: Listeners) -> None:
    controller = target.credentials(Role.CONTROLLER)
    for name, (address, served_by) in target.inside.items():
        async with target.channel(address, served_by, controller) as channel:
            for method in METHODS:
                if "ControllerService" in method or listener_of_or_none(method) == name:
                    continue
                code, _details = await status_of(channel, method)
                assert code is grpc.StatusCode.UNIMPLEMENTED, (name, method)


def listener_of_or_none(method: str) -> str | None:
    return LISTENER_OF.get(method.split(".")[-1].split("/")[0])


async def test_doors_serve_what_is_for_clients_and_nothing_else(target: Listeners) -> None:
    is_encrypted = target.authority.settings.is_encrypted
    tls = grpc.ssl_channel_credentials(target.authority.ca_pem) if is_encrypted else None
    for name, address in target.doors.items():
        server = server_name(target.authority.settings.cluster, Role.WORKER) if name == "direct" else ""
        async with client_channel(address, tls, server_name=server) as channel:
            for method in INSIDE:
                assert (await status_of(channel, method))[0] is grpc.StatusCode.UNIMPLEMENTED, (name, method)
            assert (await status_of(channel, HEALTH))[0] is grpc.StatusCode.OK


async def test_insider_does_not_take_a_door_or_another_role_for_its_peer() -> None:
    """A worker in the place of a router, or a server with a door's certificate, is refused."""
    async with listeners(is_encrypted=True) as target:
        controller = target.credentials(Role.CONTROLLER)
        async with target.channel(target.worker.address, Role.ROUTER, controller) as channel:
            assert (await status_of(channel, HEALTH))[0] is NO_WAY
        async with target.channel(target.router.admin_address, Role.WORKER, controller) as channel:
            assert (await status_of(channel, HEALTH))[0] is NO_WAY


def proof_of(credentials: Credentials, audience: str, *, lifetime_s: float = 60.0) -> str:
    return credentials.held.signer.sign({}, audience=audience, lifetime_s=lifetime_s)


class _Later:
    """The module `datetime` at a later time."""

    UTC = datetime.UTC

    def __init__(self, now_s: float) -> None:
        self.datetime = SimpleNamespace(now=lambda zone: datetime.datetime.fromtimestamp(now_s, zone))


async def refused_proof(target: Listeners, proof: str) -> str:
    """Return why a router's proof is refused at a worker's control."""
    async with grpc.aio.insecure_channel(target.worker.address) as channel:
        call: Any = channel.unary_unary("/kvrelay.v1.WorkerService/DescribeWorker")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=((METADATA_KEY, proof),))
        assert caught.value.code() is UNKNOWN
        return str(caught.value.details())


async def test_proof_is_good_for_one_listener_and_for_a_while() -> None:
    async with listeners(is_encrypted=False) as target:
        router = target.credentials(Role.ROUTER)
        good = audience_of(Role.WORKER, target.worker.address)
        async with grpc.aio.insecure_channel(target.worker.address) as channel:
            call: Any = channel.unary_unary("/kvrelay.v1.WorkerService/DescribeWorker")
            assert await call(b"", metadata=((METADATA_KEY, proof_of(router, good)),))
        elsewhere = proof_of(router, audience_of(Role.WORKER, target.worker.kv_address))
        assert "InvalidAudienceError" in await refused_proof(target, elsewhere)
        assert "ExpiredSignatureError" in await refused_proof(target, proof_of(router, good, lifetime_s=-3600))


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


async def test_proof_with_odd_contents_is_refused_like_any_other() -> None:
    """An exception past the guard would write a page of log for each call of a stranger."""
    async with listeners(is_encrypted=False) as target:
        der = ssl.PEM_cert_to_DER_cert(target.authority.ca_pem.decode())
        version = b"\xa0\x03\x02\x01"
        odd = base64.b64encode(der.replace(version + b"\x02", version + b"\x07")).decode()
        odds: tuple[Any, ...] = ([odd], [5], [[]], {}, None, "x", [base64.b64encode(der).decode()])
        for shown in odds:
            header = json.dumps({"alg": "ES256", "x5c": shown}).encode()
            assert "not valid" in await refused_proof(target, f"{encoded(header)}.e30.AA")
        worker = target.credentials(Role.ROUTER).held.signer
        good = audience_of(Role.WORKER, target.worker.address)
        for expiry in ("Infinity", "1e400", '"x"', "[]", "null"):
            claims = f'{{"sub": "{worker.identity.uri}", "aud": "{good}", "exp": {expiry}}}'.encode()
            signed = jwt.api_jws.encode(claims, worker._key, algorithm="ES256", headers=worker._headers)  # noqa: SLF001
            assert "not valid" in await refused_proof(target, signed)


def test_proof_is_good_for_no_longer_than_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A former member could make itself a proof that is good for years, and have it remembered."""
    own = authority(is_encrypted=False, lifetime_s=60.0)
    proof = proof_of(Credentials.of(own, Role.ROUTER, "router-0"), "worker:1", lifetime_s=1e8)
    verifier = Credentials.of(own, Role.WORKER, "decode-0").held.verifier
    assert verifier.identify(proof, audience="worker:1").role is Role.ROUTER
    later_s = time.time() + 120
    monkeypatch.setattr(proofs, "datetime", _Later(later_s))
    monkeypatch.setattr(time, "time", lambda: later_s)
    with pytest.raises(Unauthenticated):
        verifier.identify(proof, audience="worker:1")


@pytest.mark.parametrize("ahead_s", [-240.0, 240.0])
def test_clocks_of_hosts_may_differ_by_minutes(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + ahead_s)
    signed = proof_of(credentials_of(Role.ROUTER, "router-0"), "worker:1")
    monkeypatch.setattr(time, "time", lambda: now_s)
    credentials_of(Role.WORKER, "decode-0").held.verifier.verify(signed, audience="worker:1")


async def test_connection_is_of_use_for_no_longer_than_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A former member could keep one open for ever."""
    async with listeners(is_encrypted=True) as target:
        former = target.credentials(Role.CONTROLLER)
        async with target.channel(target.worker.address, Role.WORKER, former) as channel:
            method = "/kvrelay.v1.WorkerService/DescribeWorker"
            assert (await status_of(channel, method))[0] is grpc.StatusCode.OK
            monkeypatch.setattr(guard, "time", SimpleNamespace(time=lambda: former.held.validity.ends_unix_s + 1))
            assert (await status_of(channel, method))[0] is UNKNOWN


def test_proof_that_a_worker_was_shown_is_of_no_use_on_another_host() -> None:
    """Without TLS: workers of all hosts listen on the ports of their pool, and a router shows each the same things."""
    router = credentials_of(Role.ROUTER, "router-0")
    shown = proof_of(router, audience_of(Role.WORKER, "10.0.0.1:7000"))
    verifier = credentials_of(Role.WORKER, "decode-0").held.verifier
    assert verifier.identify(shown, audience=audience_of(Role.WORKER, "dns:///10.0.0.1:7000")).role is Role.ROUTER
    for elsewhere in ("10.0.0.2:7000", "10.0.0.1:7001", "127.0.0.1:7000", "[fd00::1]:7000", "host:7000"):
        with pytest.raises(Unauthenticated, match="InvalidAudience"):
            verifier.identify(shown, audience=audience_of(Role.WORKER, elsewhere))
    same = [
        ("localhost:1", "127.0.0.1:1"),
        ("[::1]:1", "127.0.0.1:1"),
        ("[fd00:0::1]:1", "[FD00::1]:1"),
        ("H:1", "h:1"),
    ]
    assert all(audience_of(Role.WORKER, one) == audience_of(Role.WORKER, other) for one, other in same)
    assert audience_of(Role.ROUTER, "0.0.0.0:1") == audience_of(Role.ROUTER, "10.0.0.1:1"), "it may listen on all"


async def test_proof_that_was_tampered_with_is_refused() -> None:
    async with listeners(is_encrypted=False) as target:
        router, worker = target.credentials(Role.ROUTER), target.credentials(Role.WORKER)
        good = audience_of(Role.WORKER, target.worker.address)
        proof = proof_of(router, good)
        header, claims, signature = proof.split(".")
        assert await refused_proof(target, f"{header}.{claims}.{signature[:-4]}AAAA")
        assert await refused_proof(target, "not a token")
        assert "at most" in await refused_proof(target, "x" * 7000)
        # A worker's key under a router's certificate, and a worker that says it is a router.
        worker_header = proof_of(worker, good).split(".")[0]
        assert await refused_proof(target, f"{worker_header}.{claims}.{signature}")
        forged = worker.held.signer
        claimed = {"sub": router.identity.uri, "aud": good, "exp": int(time.time()) + 60}
        token = jwt.encode(claimed, forged._key, algorithm="ES256", headers=forged._headers)  # noqa: SLF001
        assert "differs from its certificate" in await refused_proof(target, token)
        unsigned = jwt.encode(claimed, "", algorithm="none", headers=forged._headers)  # noqa: SLF001
        assert await refused_proof(target, unsigned)
