"""Calls whose errors are those of the product."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc

from common.errors import from_rpc_error

T = TypeVar("T")


async def answer_of(call: Awaitable[T]) -> T:
    """Return the answer of a unary call. Raises KvrelayError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
