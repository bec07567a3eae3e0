"""Certificates that the listeners of a cluster show to any client that connects."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from cryptography import x509

_PERIOD_S = 4.0
_TIMEOUT_S = 60.0


def shown_by(address: str) -> int:
    """Return the serial number of the certificate that a listener shows. Raises OSError, ssl.SSLError included."""
    host, _, port = address.rpartition(":")
    pem = ssl.get_server_certificate((host, int(port)), timeout=_TIMEOUT_S)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


@asynccontextmanager
async def watched(addresses: Iterable[str]) -> AsyncIterator[dict[str, set[int]]]:
    """Watch which certificates are shown where while the block runs; yields those seen so far by address."""
    seen: dict[str, set[int]] = {address: set() for address in addresses}

    async def look(address: str) -> None:
        with suppress(OSError):  # on a busy machine it may be late; the next look counts as well
            seen[address].add(await asyncio.to_thread(shown_by, address))

    async def watch() -> None:
        while True:
            await asyncio.gather(*(look(address) for address in seen))
            await asyncio.sleep(_PERIOD_S)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
