"""Bodies of requests: whose they are and what that tenant may comes first, then they arrive, then they are read."""

from functools import partial
from typing import TypeVar

from router.front_door import FrontDoor
from router.http.exchange import Exchange
from router.reading import Reading
from router.tenants import Tenant

BODY_TIMEOUT_S = 60.0
"""Longest wait for a body."""

T = TypeVar("T")


async def read_body(door: FrontDoor, exchange: Exchange, reading: Reading[T]) -> tuple[Tenant, T]:
    """Return the tenant that sends a request, and what its body says.

    Raises Unauthenticated, Overloaded, HttpError, and InvalidRequest that names the field.
    """
    tenant = await door.enter(exchange.metadata)
    exchange.pause = partial(door.turn, tenant)
    with door.arriving(tenant) as holding:
        raw = await exchange.body(holding, timeout_s=BODY_TIMEOUT_S)
        return tenant, await door.readers.read(reading, raw, tenant=tenant)
