"""Connection security of a client: none, or TLS to routers that a certificate authority vouches for."""

import os
import ssl
from pathlib import Path
from typing import TypeAlias

import grpc

from common.errors import InvalidRequest

CA_ENV = "KVRELAY_CA"
"""Names a PEM file with the certificate authorities of the routers; if set, connections use TLS."""
TLS_ENV = "KVRELAY_TLS"
"""If 1, connections use TLS with the well-known authorities."""

Tls: TypeAlias = bool | str | Path | None
"""False: no TLS. True: TLS with the well-known authorities. A path: TLS with the authorities in that file, such as the
cluster's own `ca.pem`. None: the environment decides (`KVRELAY_CA`, `KVRELAY_TLS`), else no TLS."""


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """Return gRPC's credentials; None for no TLS. Raises InvalidRequest for a file that cannot be read."""
    tls = resolve(tls)
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(None if tls is True else _read(tls))


def resolve(tls: Tls) -> bool | Path:
    """Return the setting with the environment taken into account: False, True, or a file."""
    if tls is None:
        tls = os.environ.get(CA_ENV) or os.environ.get(TLS_ENV) == "1"
    return tls if isinstance(tls, bool) else Path(tls).expanduser()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        ssl.create_default_context(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidRequest(f"cannot use {path}: it holds no certificates in PEM", field="tls") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read the certificates in {path}: {error.strerror}", field="tls") from error
    return content
