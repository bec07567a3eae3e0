"""A client that connects in the wrong way is told which way is the right one."""

from pathlib import Path

import pytest

from common.errors import Unreachable
from common.rpc_server import start_server
from common.trust.access import Audience
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.guard import Guard
from common.trust.identity import Role
from kvrelay.client import AsyncClient
from kvrelay.client.tls import Tls


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    """What vouches for the door of an encrypted cluster."""
    path = tmp_path / "ca.pem"
    path.write_bytes(authority().ca_pem)
    return path


def authority(*, is_encrypted: bool = True) -> Authority:
    return Authority.new(AuthoritySettings(cluster="door", is_encrypted=is_encrypted))


async def refused(of: Authority, tls: Tls) -> str:
    """Return what a client hears that connects to a door on 127.0.0.1 whose certificate is for another address."""
    guard = Guard(Credentials.of(of, Role.ROUTER, "router-0", ["192.0.2.1"]), Audience.CLIENTS)
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=guard)
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}", tls=tls, timeout_s=10) as client:
            with pytest.raises(Unreachable) as caught:
                await client.models()
        return caught.value.message
    finally:
        await server.stop(0)


async def test_client_in_plain_text_is_told_of_tls() -> None:
    assert "if it uses TLS, name the certificates that vouch for it" in await refused(authority(), tls=False)


async def test_client_with_other_certificates_is_told_that_they_do_not_vouch(ca: Path) -> None:
    assert "the given certificates do not vouch for it" in await refused(authority(), tls=ca)


async def test_client_by_another_name_is_told_of_tls_names(tmp_path: Path) -> None:
    of = authority()
    (tmp_path / "ca.pem").write_bytes(of.ca_pem)

    assert "add this one to tls.names" in await refused(of, tls=tmp_path / "ca.pem")


async def test_client_by_tls_of_a_door_without_it_is_told_to_leave_it_out(ca: Path) -> None:
    assert "it does not use TLS" in await refused(authority(is_encrypted=False), tls=ca)
