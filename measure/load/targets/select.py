"""From an address to a target."""

from urllib.parse import urlsplit

from common.errors import InvalidRequest
from measure.load.targets.interface import Target, TargetSpec


def make_target(spec: TargetSpec) -> Target:
    """Return a target that is not connected yet. Belongs to the event loop that first uses it. Raises InvalidRequest.

    Imports only what its kind needs: a generator process starts while others measure.
    """
    scheme, separator, rest = spec.url.partition("://")
    if separator and scheme in ("http", "https"):
        from measure.load.targets.openai import OpenAiTarget

        if not urlsplit(spec.url).hostname:
            raise InvalidRequest(f"target {spec.url!r} names no host", field="target")
        return OpenAiTarget(spec)
    address = rest if separator else spec.url
    if (separator and scheme != "grpc") or not all(map(_is_address, address.split(","))):
        raise InvalidRequest(
            f"target {spec.url!r} is neither HOST:PORT[,…], grpc://HOST:PORT[,…] nor http(s)://HOST[:PORT]/v1",
            field="target",
        )
    from measure.load.targets.grpc import GrpcTarget

    return GrpcTarget(spec, address)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16
