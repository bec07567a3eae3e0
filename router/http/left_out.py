"""Tells a client which parts of its request had no effect, in the header `warning`."""

import re
from collections.abc import Sequence

from router.http.errors import Headers

_MAX_NAMES = 8
_MAX_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
"""Characters that a client may have put into a name and that a header or its reader could take for something else."""


def warning_headers(left_out: Sequence[str]) -> Headers:
    """Return the header that names the parts, or none."""
    if not left_out:
        return []
    names = ", ".join(_UNSAFE.sub("?", name[:_MAX_CHARS]) for name in left_out[:_MAX_NAMES])
    more = len(left_out) - _MAX_NAMES
    if more > 0:
        names += f" and {more} more"
    return [(b"warning", f'299 kvrelay "left out: {names}"'.encode())]
