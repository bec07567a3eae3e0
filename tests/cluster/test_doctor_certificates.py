"""`kvrelay doctor` reports a certificate that was not renewed before it expires."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.doctor.finding import Health
from cluster.doctor.service import check_certificates
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.guard import Guard
from common.trust.identity import Role

_DAY_S = 86_400.0


def authority(folder: Path, *, lifetime_s: float, is_encrypted: bool = True) -> Authority:
    """Return the authority of a folder, the same one each time, which issues certificates of this lifetime."""
    settings = AuthoritySettings(cluster="doctor", is_encrypted=is_encrypted, lifetime_s=lifetime_s)
    return Authority.open(folder, settings)


@asynccontextmanager
async def worker(credentials: Credentials) -> AsyncIterator[str]:
    guard = Guard(credentials, Audience.INSIDERS)
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=guard)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("left_s", "verdict", "told"),
    [
        (_DAY_S, Health.OK, "2 are good for 24.0 h or longer"),
        (_DAY_S / 5, Health.WARNING, "that of decode-0 expires in 4.8 h and was not renewed"),
        (-130.0, Health.FAILURE, "that of decode-0 expired 2.2 min ago"),
    ],
)
async def test_certificate_of_a_worker_that_should_have_been_renewed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, verdict: Health, told: str
) -> None:
    operator = Credentials.of(authority(tmp_path, lifetime_s=_DAY_S), Role.OPERATOR, "operator")
    credentials = Credentials.of(authority(tmp_path, lifetime_s=left_s), Role.WORKER, "decode-0")
    issued_s = credentials.held.validity.ends_unix_s - left_s
    monkeypatch.setattr("cluster.doctor.service.time", SimpleNamespace(time=lambda: issued_s))

    async with worker(credentials) as address:
        (finding,) = await check_certificates({"decode-0": address}, operator)

    assert finding.verdict is verdict
    assert told in finding.detail


async def test_expired_certificate_of_the_operator_itself_is_a_failure(tmp_path: Path) -> None:
    plain = authority(tmp_path, lifetime_s=-60.0, is_encrypted=False)

    (finding,) = await check_certificates({}, Credentials.of(plain, Role.OPERATOR, "operator"))

    assert finding.verdict is Health.FAILURE
    assert "that of the operator expired" in finding.detail


async def test_process_that_is_not_reached_is_left_to_other_checks(tmp_path: Path) -> None:
    operator = Credentials.of(authority(tmp_path, lifetime_s=_DAY_S), Role.OPERATOR, "operator")

    (finding,) = await check_certificates({"decode-0": "127.0.0.1:1"}, operator)

    assert finding.verdict is Health.OK
