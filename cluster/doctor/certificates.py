"""Checks how long the certificates that a cluster's processes show are still good: one that was not renewed expires."""

import asyncio
import time
from collections.abc import Mapping

from cluster.doctor.finding import Finding, failure, ok, warning
from common.trust.authority import RENEW_SHARE
from common.trust.credentials import Credentials
from common.trust.shown import Onlooker

_LATE_SHARE = (1 - RENEW_SHARE) * 3 / 4
"""A share of a certificate's life: with less than this left it should have been renewed a while ago."""
_LATE_OWN_S = 7 * 86_400.0
"""The same of a certificate that the operator has brought."""


async def check_certificates(addresses: Mapping[str, str], operator: Credentials) -> list[Finding]:
    """Return which of the processes that listen at `addresses`, by name, have a certificate that will soon expire."""
    lifetime_s, now_s = operator.held.enrolment.lifetime_s, time.time()
    left_s = {"the operator": operator.held.expires_unix_s - now_s}
    late = [*_late("the operator", left_s["the operator"], _LATE_SHARE * lifetime_s)]
    if operator.is_encrypted:
        onlooker = Onlooker(operator)
        shown = await asyncio.gather(*(onlooker.look_at(address) for address in addresses.values()))
        for name, certificate in zip(addresses, shown, strict=True):
            if certificate is not None:  # else it is not reached, which others tell
                left_s[name] = certificate.expires_unix_s - now_s
                allowed_s = _LATE_SHARE * lifetime_s if certificate.is_issued else _LATE_OWN_S
                late += _late(name, left_s[name], allowed_s)
    return late or [ok("certificates", f"{len(left_s)} are good for {_span(min(left_s.values()))} or longer")]


def _late(name: str, left_s: float, allowed_s: float) -> list[Finding]:
    if left_s >= allowed_s:
        return []
    advice = "the controller renews it while it runs: see `kvrelay logs supervisor`; own files: replace them"
    if left_s <= 0:
        return [failure("certificates", f"that of {name} expired {_span(-left_s)} ago: no new connection", advice)]
    return [warning("certificates", f"that of {name} expires in {_span(left_s)} and was not renewed", advice)]


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"
