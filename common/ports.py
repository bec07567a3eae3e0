"""Ports and addresses of this machine."""

import errno
import ipaddress
import random
import re
import socket
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import psutil

_Listening = TypeVar("_Listening")

MAX_PORT = 65535
MAX_OWN_NAMES = 32
_FREE_PORTS = range(22000, 32000)
"""Where free ports are looked for: below those that the system gives to outgoing connections and to port 0, any of
which may take a port between the look and its use."""
_MAX_TRIES = 100
_MAX_NAME_CHARS = 253
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?")
_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def address_of(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def dial_address(host: str, port: int) -> str:
    """Return the host:port under which this machine reaches a server that listens on `host`."""
    bare = host.strip("[]")
    return address_of(_WILDCARDS.get(bare, bare), port)


def listening_address(host: str) -> str:
    """Return the one IP address on which every server of `host` listens: a name's first, IPv4 before IPv6.

    Raises OSError for a name that is not known.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # such as an empty label
        raise OSError(errno.EINVAL, f"{host!r} is not a host's name") from error
    families = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    return families.get(socket.AF_INET) or families[socket.AF_INET6]


def with_port(address: str, port: int) -> str:
    """Return `address` with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable only from this host."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Return whether `host` names this machine: its loopback, one of its addresses or its own name."""
    bare = host.strip("[]")
    return bare in _WILDCARDS or is_loopback(bare) or bare == socket.gethostname() or bare in _own_addresses()


def is_address(text: str) -> bool:
    """Return whether `text` is an IP address, perhaps in brackets."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def is_dns_name(text: str) -> bool:
    """Return whether `text` is a DNS name as in certificates: ASCII labels, perhaps with a leading wildcard.

    TLS libraries cut a name at a zero byte, so an authority must check names with this before it certifies them.
    """
    return len(text) <= _MAX_NAME_CHARS and _DNS_NAME.fullmatch(text) is not None


def names_of(host: str) -> list[str]:
    """Return the addresses and names of a listener on `host`, for its certificate.

    At most `MAX_OWN_NAMES`. Link-local addresses, of which a host of containers may have hundreds, are left out.
    """
    bare = host.strip("[]")
    if bare in _WILDCARDS:
        named = [name for name in ("localhost", socket.gethostname()) if is_dns_name(name)]
        return list(dict.fromkeys([*named, *_own_addresses()]))[:MAX_OWN_NAMES]
    if bare == "localhost":
        return ["localhost", "127.0.0.1", "::1"]
    return ["localhost", bare] if is_loopback(bare) else [bare]


def _own_addresses() -> list[str]:
    """Return this host's addresses without link-local ones; loopback first."""
    own = (each for of_interface in psutil.net_if_addrs().values() for each in of_interface)
    texts = {each.address.partition("%")[0] for each in own if each.family in (socket.AF_INET, socket.AF_INET6)}
    found = [address for address in map(ipaddress.ip_address, texts) if not address.is_link_local]
    found.sort(key=lambda address: (not address.is_loopback, address.version, int(address)))
    return [str(address) for address in found]


def free_port(host: str) -> int:
    """Return a port that is free on `host` now. Raises OSError as `free_ports`."""
    return free_ports(host, 1)


def free_ports(host: str, count: int, *, taken: Collection[int] = ()) -> int:
    """Return the first of `count` consecutive ports that are free on `host` now and not in `taken`.

    Raises OSError for an address of another machine, and when no such ports were found.
    """
    for _ in range(_MAX_TRIES):
        first = random.choice(_FREE_PORTS)
        row = range(first, first + count)
        if not any(port in taken for port in row) and all(is_port_free(host, port) for port in row):
            return first
    raise OSError(errno.EADDRNOTAVAIL, f"cannot find {count} consecutive free ports")


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `port`. Raises OSError for an address of another machine."""
    try:
        with listen_on(host, port, backlog=1):
            return True
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise


def listen_on_first(ports: Sequence[int], listen: Callable[[int], _Listening]) -> _Listening:
    """Return the result of `listen` for the first port that works. Raises the OSError of the last port."""
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


def listen_on(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening socket, which `::` opens to IPv4 as well. Raises OSError.

    Sets SO_REUSEADDR, as gRPC does: a port whose last connections linger in TIME_WAIT is free.
    """
    address = listening_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, backlog=backlog, dualstack_ipv6=is_dual)
