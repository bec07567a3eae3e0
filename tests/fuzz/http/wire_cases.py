"""Bytes on a connection: requests behind one another, cut into packets anywhere, and damaged ones.

Undamaged requests are each answered once, in their order. Damaged ones only have to get complete, documented answers;
the connection may end at any answer.
"""

import json
import random
import socket
from contextlib import suppress

from tests.fuzz.http.door import Door
from tests.fuzz.http.oracle import STATUSES, Log

TIMEOUT_S = 30.0
_SILENCE_S = 0.3
"""After damaged bytes, which may be the beginning of anything."""
_WHERE = "bytes on a connection"


def _with_body(path: str, fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def _chunked(path: str, fields: object) -> bytes:
    body = json.dumps(fields).encode()
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))
    return b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%s" % (path.encode(), chunks)


_COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 3}
REQUESTS: tuple[tuple[bytes, int], ...] = (
    (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 200),
    (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    (b"DELETE /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    (_with_body("/v1/completions", _COMPLETION), 200),
    (_with_body("/v1/completions", {**_COMPLETION, "stream": True}), 200),
    (_chunked("/v1/completions", _COMPLETION), 200),
    (_chunked("/tokenize", {"prompt": "text"}), 200),
    (_with_body("/detokenize", {"tokens": ["a"]}), 400),
    (_with_body("/live", {"a": "body that nobody reads"}), 405),
)
"""Requests, each with its expected status."""
_LAST = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class WireCases:
    """Makes connections and judges what comes back."""

    def __init__(self, door: Door, log: Log) -> None:
        self._door = door
        self._log = log

    def run(self, number: int, *, num_examples: int) -> None:
        """Use that many connections; what is sent follows from the number."""
        draw = random.Random(f"{number} wire")
        for _ in range(num_examples):
            sent = [draw.choice(REQUESTS) for _ in range(draw.randint(0, 5))]
            data = b"".join(request for request, _status in sent) + _LAST
            kind = draw.choice(("whole", "damaged", "left"))
            if kind == "whole":
                self._expect(_packets(data, draw), [*(status for _request, status in sent), 200])
            elif kind == "damaged":
                self._judge(_packets(_damaged(data, draw), draw))
            else:
                self._leave(_packets(data[: draw.randrange(len(data))], draw))

    def _expect(self, packets: list[bytes], statuses: list[int]) -> None:
        found, rest = self._talk(packets, timeout_s=TIMEOUT_S)
        if found != statuses or rest:
            self._log.find(_WHERE, f"answered {found}, not {statuses}; then {rest[:200]!r}", b"".join(packets))

    def _judge(self, packets: list[bytes]) -> None:
        found, rest = self._talk(packets, timeout_s=_SILENCE_S)
        if rest:
            self._log.find(_WHERE, f"an answer that is not whole: {rest[:200]!r}", b"".join(packets))
        if wrong := [status for status in found if status not in STATUSES or status in (500, 503, 504)]:
            self._log.find(_WHERE, f"statuses {wrong}", b"".join(packets))

    def _leave(self, packets: list[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", self._door.port), TIMEOUT_S) as connection, suppress(OSError):
            for packet in packets:
                connection.sendall(packet)

    def _talk(self, packets: list[bytes], *, timeout_s: float) -> tuple[list[int], bytes]:
        """Send, and return the statuses of whole answers with what is left of the bytes that came."""
        data = b""
        with socket.create_connection(("127.0.0.1", self._door.port), TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):
                for packet in packets:
                    connection.sendall(packet)
            statuses = []
            with suppress(OSError):
                while True:
                    connection.settimeout(TIMEOUT_S if data else timeout_s)  # an answer that has begun has time to end
                    came = connection.recv(1 << 16)
                    data += came
                    while (answer := _first_answer(data)) is not None:
                        statuses.append(answer[0])
                        self._log.statuses[_WHERE, answer[0]] += 1
                        data = data[answer[1] :]
                    if not came:
                        break
        return statuses, data


def _packets(data: bytes, draw: random.Random) -> list[bytes]:
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 3, 20))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _damaged(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 1, 2, 5))):
        start = draw.randrange(len(data))
        end = min(len(data), start + draw.choice((0, 1, 1, 2, 20)))
        put = draw.choice((b"", bytes([draw.randrange(256)]), b"\r\n", b"\r\n\r\n", b"0", b" ", b"\0", b"\xff" * 10))
        data = (data[:start] + put + data[end:]) or b"x"
    return data


def _first_answer(data: bytes) -> tuple[int, int] | None:
    """Return status and length of the answer at the beginning, or None where there is no whole one."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end or not head.startswith(b"HTTP/1.1 "):
        return None
    status, length = int(head[9:12]), len(head) + 4
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    if status == 100:
        return status, length
    if b"content-length" in headers:
        length += int(headers[b"content-length"])
        return (status, length) if len(data) >= length else None
    while True:  # chunks
        size, end, _ = data[length:].partition(b"\r\n")
        if not end:
            return None
        length += len(size) + 2 + int(size, 16) + 2
        if len(data) < length:
            return None
        if int(size, 16) == 0:
            return status, length
