"""Bodies of requests: whose they are and what that tenant may comes first, then they arrive, then they are read."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeVar

from router.doors.front_door import FrontDoor
from router.doors.readers import Reading
from router.http.exchange import Exchange
from router.tenants import Tenant

BODY_TIMEOUT_S = 60.0
"""Longest wait for a body."""


class _Call(Protocol):
    """The meaning of a body."""

    @property
    def left_out(self) -> Sequence[str]:
        """Its parts without an effect."""
        ...


T = TypeVar("T", bound=_Call)


async def read_body(
    door: FrontDoor, exchange: Exchange, reading: Reading[T], *, needs_worker: bool = True
) -> tuple[Tenant, T]:
    """Return the tenant that sends a request, and what its body says.

    Raises Unauthenticated, Overloaded, HttpError, and InvalidRequest that names the field.
    """
    tenant = await door.enter(exchange.metadata, needs_worker=needs_worker)
    exchange.pause = partial(door.turn, tenant)
    exchange.unread = door.parts.admission.unread.holding(tenant, lambda _refused: exchange.break_off())
    with door.arriving(tenant) as holding:
        raw = await exchange.body(holding, timeout_s=BODY_TIMEOUT_S)
        call = await door.readers.read(reading, raw, tenant=tenant)
    exchange.left_out = call.left_out
    return tenant, call
