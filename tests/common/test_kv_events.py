"""Batches of KV events, as a worker might send them."""

import msgpack
import pytest

from common.kv_events import decode_events


@pytest.mark.parametrize(
    "batch",
    [
        {"v": 1, "snap": False, "add": "x" * 16, "del": b""},
        {"v": 1, "snap": False, "add": b"", "del": [1] * 16},
        {"v": 1, "snap": False, "add": b"x" * 15, "del": b""},
        {"v": 2, "snap": False, "add": b"", "del": b""},
        {"v": 1},
        [1, 2],
        7,
    ],
)
def test_batch_that_is_none_is_refused_as_a_whole(batch: object) -> None:
    with pytest.raises(ValueError, match=r"KV event|block hashes"):
        decode_events(msgpack.packb(batch))
