"""How the hidden states of a prompt become one vector."""

import enum
from collections.abc import Mapping

from common.errors import InvalidRequest
from kvrelay.v1 import sampling_pb2


class Pooling(enum.Enum):
    """Hidden states, after the model's last norm, that an embedding is made of."""

    LAST = "last"
    """The state of the last token."""
    MEAN = "mean"
    """The mean over all tokens. Those in the cache are computed again, because a cache holds no hidden states."""


_POOLINGS: Mapping[int, Pooling] = {sampling_pb2.POOLING_LAST: Pooling.LAST, sampling_pb2.POOLING_MEAN: Pooling.MEAN}


def pooling_from_proto(number: int, *, field: str) -> Pooling | None:
    """Return the pooling; None when it is not set. Raises InvalidRequest for an unknown one."""
    if number == sampling_pb2.POOLING_UNSPECIFIED:
        return None
    if number not in _POOLINGS:
        raise InvalidRequest(f"pooling {number} is unknown", field=field)
    return _POOLINGS[number]


def pooling_to_proto(pooling: Pooling | None) -> "sampling_pb2.Pooling.ValueType":
    """Return the number of a pooling; that of an unset one for None."""
    match pooling:
        case Pooling.LAST:
            return sampling_pb2.POOLING_LAST
        case Pooling.MEAN:
            return sampling_pb2.POOLING_MEAN
        case None:
            return sampling_pb2.POOLING_UNSPECIFIED
