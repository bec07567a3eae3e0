"""Settings of the KV connector for vLLM's own servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
from pydantic import Field

from common.config import TransferConfig
from common.config.keys import Port
from common.config.workers import TransportName


class ConnectorConfig(TransferConfig):
    """Keys of `kv_connector_extra_config`."""

    transports: tuple[TransportName, ...] = ("shm", "grpc")
    host: str = "127.0.0.1"
    """Name or address of this host, by which other servers reach it."""
    port: Port = 0
    """Port of rank 0, further ranks have the next ones; 0 takes free ones."""
    ring_mib: Annotated[int, Field(gt=0)] = 1024
    """Host memory for offered pages, per rank; it is taken as it is used."""
    pull_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after which a pull is given up and the prompt computed here. It may wait for the prefill."""
    tls_dir: Path | None = None
    """Folder of ca.pem, cert.pem and key.pem; both sides of a transfer show a certificate of that authority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates by which two servers know each other."""

    ca: bytes
    cert: bytes
    key: bytes

    @classmethod
    def of(cls, folder: Path) -> "Tls":
        """Read the files of a folder. Raises OSError."""
        ca, cert, key = ((folder / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key"))
        return cls(ca=ca, cert=cert, key=key)

    def server(self) -> grpc.ServerCredentials:
        """Return the credentials of a listener, which asks for a certificate."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
