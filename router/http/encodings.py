"""Reads compressed bodies within the limit of all bodies, a piece in each turn of the event loop.

A small body may unpack to any size: unpacking ends where the limit is passed.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence

from common.errors import InvalidRequest
from router.http.errors import UNSUPPORTED_ENCODING, HttpError
from router.record.budget import Holding

_PIECE_BYTES = 1 << 20
"""Bytes that a turn unpacks at most, in a few milliseconds."""
_MAX_PARTS = 128
"""Parts of one body; each copies the rest, and 20 bytes may be one."""
_WINDOW_BITS: Mapping[bytes, int] = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""Content encodings that are read, each with the format as zlib numbers them."""


def encoding_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return how a body is compressed, None for not at all. Raises HttpError for what cannot be read."""
    given = b",".join(value for name, value in headers if name == b"content-encoding").strip().lower()
    if given in (b"", b"identity"):
        return None
    if given not in _WINDOW_BITS:
        shown = given[:40].decode("latin-1")
        raise HttpError(f"content-encoding {shown!r} cannot be read: send gzip, deflate or none", UNSUPPORTED_ENCODING)
    return given


async def unpacked(body: bytes, encoding: bytes, holding: Holding, *, too_large: HttpError, most_bytes: int) -> bytes:
    """Return a body of at most `most_bytes` without its compression; what is unpacked is held, too.

    Raises `too_large`, InvalidRequest, and Overloaded when it may not be held.
    """
    pieces: list[bytes] = []
    num_left, num_parts, unpacker = most_bytes, 1, zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        while body or not unpacker.eof:
            piece = unpacker.decompress(body, _PIECE_BYTES)
            pieces.append(piece)
            num_left -= len(piece)
            if num_left < 0:
                raise too_large
            if (refused := holding.grow(len(piece))) is not None:
                raise refused.error()
            body = unpacker.unconsumed_tail
            if unpacker.eof:
                body = unpacker.unused_data  # gzip may have several parts
                unpacker = zlib.decompressobj(_WINDOW_BITS[encoding]) if body else unpacker
                num_parts += bool(body)
                if num_parts > _MAX_PARTS:
                    raise InvalidRequest(f"the body has more than {_MAX_PARTS} compressed parts")
            elif not piece:
                raise InvalidRequest(f"the body ends in the middle of its {encoding.decode()} data")
            await asyncio.sleep(0)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding.decode()}: {error}") from None
    return b"".join(pieces)
