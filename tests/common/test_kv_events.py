"""Invalid batches of KV events."""

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
def test_invalid_batch_is_refused_as_a_whole(batch: object) -> None:
    with pytest.raises(ValueError, match=r"KV event|block hash"):
        decode_events(msgpack.packb(batch))
