"""What a client says of TLS: from its argument, from the environment, and when both ends do not fit."""

from pathlib import Path

import pytest

from common.errors import InvalidRequest
from common.trust.identity import Role
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
def test_failed_handshake_says_what_to_do(message: str, hint: str) -> None:
    assert hint in _tls_hint(message)
    assert bool(_tls_hint(message)) is bool(hint)
