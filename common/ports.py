"""Ports and addresses of this machine."""

import errno
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import psutil

_Listening = TypeVar("_Listening")

MAX_PORT = 65535
MAX_OWN_NAMES = 32
_MAX_TRIES = 100
_MAX_NAME_CHARS = 253
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?")
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def dial_address(host: str, port: int) -> str:
    """Return the host:port by which this machine reaches a server that listens on `host`."""
    bare = host.strip("[]")
    bare = _WILDCARDS.get(bare, bare)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def with_port(address: str, port: int) -> str:
    """Return host:port of another port of the same host."""
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach what listens on `host`, or what is dialled by it."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Whether a text is an IP address, perhaps in brackets."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def is_dns_name(text: str) -> bool:
    """Whether a text is a DNS name as certificates have it: ASCII labels, perhaps behind a wildcard, and nothing else.

    TLS libraries take a name with a zero byte for what stands before it, so whoever certifies names asks this first.
    """
    return len(text) <= _MAX_NAME_CHARS and _DNS_NAME.fullmatch(text) is not None


def names_of(host: str) -> list[str]:
    """Return the addresses and names by which what listens on `host` may be reached, for its certificate.

    At most `MAX_OWN_NAMES`; link-local ones, of which a host of containers may have hundreds, are left out.
    """
    bare = host.strip("[]")
    if bare in _WILDCARDS:
        named = [name for name in ("localhost", socket.gethostname()) if is_dns_name(name)]
        return list(dict.fromkeys([*named, *_own_addresses()]))[:MAX_OWN_NAMES]
    return ["localhost", "127.0.0.1"] if bare in ("127.0.0.1", "localhost") else [bare]


def _own_addresses() -> list[str]:
    """Return this host's addresses, but for those that are good on one link only; loopback first."""
    own = (each for of_interface in psutil.net_if_addrs().values() for each in of_interface)
    texts = {each.address.partition("%")[0] for each in own if each.family in (socket.AF_INET, socket.AF_INET6)}
    found = [address for address in map(ipaddress.ip_address, texts) if not address.is_link_local]
    found.sort(key=lambda address: (not address.is_loopback, address.version, int(address)))
    return [str(address) for address in found]


def free_port(host: str) -> int:
    """Return a port that is free on `host` now. Raises OSError for an address that is not this machine's."""
    with _listen(host, 0) as listener:
        return int(listener.getsockname()[1])


def free_ports(host: str, count: int, *, taken: Collection[int] = ()) -> int:
    """Return the first of `count` ports in a row that are free on `host` now, and none of them `taken`.

    Raises OSError for an address that is not this machine's, and when no such row was found.
    """
    for _ in range(_MAX_TRIES):
        first = free_port(host)
        row = range(first, first + count)
        is_ours = row[-1] <= MAX_PORT and not any(port in taken for port in row)
        if is_ours and all(is_port_free(host, port) for port in row[1:]):
            return first
    raise OSError(errno.EADDRNOTAVAIL, f"no {count} free ports in a row")


def is_port_free(host: str, port: int) -> bool:
    """Whether `port` can be listened on. Raises OSError for an address that is not this machine's."""
    try:
        with _listen(host, port):
            return True
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise


def listen_on_first(ports: Sequence[int], listen: Callable[[int], _Listening]) -> _Listening:
    """Return what `listen` makes of the first port for which it does not raise OSError; raises the last one's."""
    for port in ports[:-1]:
        try:
            return listen(port)
        except OSError:
            continue
    try:
        return listen(ports[-1])
    except OSError as error:
        if len(ports) == 1:
            raise
        raise OSError(error.errno, f"none of the ports {ports[0]} to {ports[-1]} is free: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # Sets SO_REUSEADDR, as gRPC does: a port whose last connections linger in TIME_WAIT is free.
    return socket.create_server(address, family=family, backlog=1, dualstack_ipv6=family == socket.AF_INET6)
