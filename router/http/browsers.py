"""Rules for web browsers, whose pages are clients that no user of the door has started.

Without `router.auth`, every program that reaches the door is a client, and a browser reaches it for every page that it
shows. So

- a request names the router by an address, by a name without a dot, which no site on the internet has, or by a name
  that is known. A page whose own name was turned to the router's address (DNS rebinding) names itself, and is refused;
- a page of another origin is refused, whether its browser says so in `origin` or in `sec-fetch-site`;
- a request of any page declares its body to be JSON, for which browsers ask first (a CORS preflight).

With API keys a page can do nothing before its user gives it one, so any name and any origin will do. In both cases
pages of `router.allowed_origins` may send requests and read the answers, and so may pages that the router's own host
serves on a loopback name, as of a program under development, where they ask by one.
"""

import re
import socket
from collections.abc import Mapping, Sequence

from common.config import RouterConfig
from common.ports import is_address, is_dns_name, is_loopback, names_of
from router.http.errors import FOREIGN_PAGE, NOT_JSON, Headers, HttpError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d*)?")
_OTHER_SITES = (b"cross-site", b"same-site")
_PREFLIGHT_S = b"600"
_EXPOSED = b"retry-after, retry-after-ms, x-request-id, request-id"


class BrowserRules:
    """The rules of one router's HTTP door."""

    def __init__(self, config: RouterConfig, names: Sequence[str] = ()) -> None:
        """Take `names`, further names of the router: those of its certificate."""
        known = (*names_of(config.host), socket.gethostname(), *names, *config.allowed_hosts)
        self._names = {name.lower().rstrip(".") for name in known}
        self._origins = {origin.encode() for origin in config.allowed_origins}
        self._is_open = config.auth == "none"

    def refusal(self, method: str, headers: Headers) -> HttpError | None:
        """Return the error for a request that may come from a page of another site, else None."""
        if not self._is_open:
            return None
        given = dict(headers)
        host, origin = given.get(b"host"), given.get(b"origin")
        if host is not None and not self._is_known(host.decode("latin-1").lower()):
            name = host.decode("latin-1")[:80]
            return HttpError(
                f"this router is not known as {name}; list the name in router.allowed_hosts, or set router.auth",
                FOREIGN_PAGE,
            )
        if origin is None:
            is_foreign = given.get(b"sec-fetch-site") in _OTHER_SITES and given.get(b"sec-fetch-mode") != b"navigate"
        else:
            is_foreign = not (self._is_allowed(given) or origin.lower().partition(b"://")[2] == (host or b"").lower())
        if is_foreign:
            return HttpError(
                "a page of another site may not call this router; list its origin in router.allowed_origins",
                FOREIGN_PAGE,
            )
        media_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if origin is not None and method == "POST" and media_type != b"application/json":
            return HttpError("a page must send `content-type: application/json`", NOT_JSON)
        return None

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Return whether a browser asks if a page of an allowed origin may send a request."""
        given = dict(headers)
        return method == "OPTIONS" and b"access-control-request-method" in given and self._is_allowed(given)

    def answer_headers(self, method: str, headers: Headers) -> Headers:
        """Return the headers that let pages of allowed origins read the answer, or send what they asked to send."""
        given = dict(headers)
        origin = given.get(b"origin")
        vary = (b"vary", b"origin")
        if origin is None or not self._is_allowed(given):
            return [vary] if self._origins else []
        allowed = [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]
        if self.is_preflight(method, headers):
            allowed += [
                (b"access-control-allow-methods", given[b"access-control-request-method"]),
                (b"access-control-allow-headers", given.get(b"access-control-request-headers", b"")),
                (b"access-control-max-age", _PREFLIGHT_S),
            ]
        return allowed

    def _is_allowed(self, given: Mapping[bytes, bytes]) -> bool:
        """Return whether the page of a request with these headers may send it."""
        origin = given.get(b"origin", b"")
        if origin in self._origins or b"*" in self._origins:
            return True
        _, _, page = origin.partition(b"://")
        return _is_own_host(page) and _is_own_host(given.get(b"host", b""))

    def _is_known(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = parts[1].rstrip(".")
        if is_address(name) or name in self._names:
            return True
        first, dot, rest = name.partition(".")
        return is_dns_name(name) and (not dot or (bool(first) and f"*.{rest}" in self._names))


def _is_own_host(host: bytes) -> bool:
    """Return whether a host, with its port, is a loopback name or address."""
    parts = _HOST.fullmatch(host.decode("latin-1").lower())
    return parts is not None and is_loopback(parts[1].strip("[]"))
