"""A listener survives certificates that it cannot use."""

import asyncio
import ssl
from pathlib import Path

import pytest

from common.trust import doors
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.doors import FileDoor, keep_fresh
from common.trust.identity import Role
from tests.hosts.certificates import shown_by

_AUTHORITY = Authority.new(AuthoritySettings(cluster="door", is_encrypted=True))


def write_pair(folder: Path, *, key_of: Credentials, certificate_of: Credentials) -> tuple[Path, Path]:
    certificate, key = folder / "chain.pem", folder / "key.pem"
    certificate.write_bytes(certificate_of.held.certificate_pem)
    key.write_bytes(key_of.held.key_pem)
    return certificate, key


def fresh() -> Credentials:
    return Credentials.of(_AUTHORITY, Role.ROUTER, "router-0", ["127.0.0.1"])


async def test_half_replaced_files_leave_the_door_its_old_certificate(tmp_path: Path) -> None:
    old, new = fresh(), fresh()
    door = FileDoor(*write_pair(tmp_path, key_of=old, certificate_of=old))
    context = door.ssl_context()
    listener = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with listener:
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        before = await asyncio.to_thread(shown_by, address)
        write_pair(tmp_path, key_of=old, certificate_of=new)

        with pytest.raises(ssl.SSLError):
            door.refresh(context)

        assert await asyncio.to_thread(shown_by, address) == before
        write_pair(tmp_path, key_of=new, certificate_of=new)
        door.refresh(context)
        assert await asyncio.to_thread(shown_by, address) != before


async def test_unreadable_certificate_is_retried_and_fails_no_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors, "_RETRY_S", 0.0)
    refreshed, num_tries = asyncio.Event(), 0

    def refresh() -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise OSError("no space left on device")
        refreshed.set()

    credentials = fresh()
    keep_fresh(credentials, refresh)

    credentials.renew(lambda request: _AUTHORITY.enrol(request, role=Role.ROUTER, name="router-0"))

    await asyncio.wait_for(refreshed.wait(), 60)
