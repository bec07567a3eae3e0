"""TLS of a client: its argument, the environment, and the advice in errors when both ends do not match."""

from pathlib import Path

import pytest

from common.errors import InvalidRequest, Unreachable
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.guard import Guard
from common.trust.identity import Role
from kvrelay.client import AsyncClient
from kvrelay.client.convert import _tls_hint
from kvrelay.client.tls import CA_ENV, TLS_ENV, channel_credentials, resolve
from tests.trust import credentials_of


@pytest.mark.parametrize(
    ("tls", "environment", "expected"),
    [
        (None, {}, False),
        (None, {TLS_ENV: "1"}, True),
        (None, {TLS_ENV: "0"}, False),
        (None, {CA_ENV: "/a/ca.pem"}, Path("/a/ca.pem")),
        (None, {CA_ENV: "/a/ca.pem", TLS_ENV: "1"}, Path("/a/ca.pem")),
        (False, {CA_ENV: "/a/ca.pem"}, False),
        (True, {CA_ENV: "/a/ca.pem"}, True),
        ("/b/ca.pem", {CA_ENV: "/a/ca.pem"}, Path("/b/ca.pem")),
    ],
)
def test_argument_goes_before_the_environment(
    tls: bool | str | None, environment: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CA_ENV, TLS_ENV):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert resolve(tls) == expected


def test_file_that_holds_no_certificates_is_refused_by_its_name(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no certificate")
    for path, reason in ((other, "holds no certificates"), (tmp_path / "missing.pem", "No such file")):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            channel_credentials(path)
        assert caught.value.field == "tls"
        assert str(path) in caught.value.message


def test_file_with_certificates_makes_a_connection_tls(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(credentials_of(Role.ROUTER, "router-0").held.ca_pem)

    assert channel_credentials(str(path)) is not None
    assert channel_credentials(False) is None


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Tls handshake failed: WRONG_VERSION_NUMBER", "does not use TLS"),
        ("SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: self signed", "do not vouch for it"),
        ("ipv4:127.0.0.1:1: Socket closed", "--ca"),
        ("Connection refused", ""),
    ],
)
def test_failed_handshake_comes_with_advice(message: str, hint: str) -> None:
    assert hint in _tls_hint(message)
    assert bool(_tls_hint(message)) is bool(hint)


@pytest.mark.parametrize(
    ("is_encrypted", "trusts", "advice"),
    [
        (True, "no certificate", "if it uses TLS, name the certificates that vouch for it"),
        (True, "another cluster", "the given certificates do not vouch for it"),
        (True, "this cluster", "add this one to tls.names"),
        (False, "another cluster", "it does not use TLS"),
    ],
)
async def test_client_that_cannot_connect_hears_what_to_change(
    is_encrypted: bool, trusts: str, advice: str, tmp_path: Path
) -> None:
    """The router is at 127.0.0.1 and its certificate for another address."""
    cluster = Authority.new(AuthoritySettings(cluster="door", is_encrypted=is_encrypted))
    other = Authority.new(AuthoritySettings(cluster="door", is_encrypted=True))
    ca = tmp_path / "ca.pem"
    ca.write_bytes((cluster if trusts == "this cluster" else other).ca_pem)
    guard = Guard(Credentials.of(cluster, Role.ROUTER, "router-0", ["192.0.2.1"]), Audience.CLIENTS)
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=guard)
    try:
        tls = False if trusts == "no certificate" else ca
        async with AsyncClient(f"127.0.0.1:{server.port}", tls=tls, timeout_s=60) as client:
            with pytest.raises(Unreachable, match=advice):
                await client.models()
    finally:
        await server.stop(0)
