"""HTTP mock engines: a health check, and a completion of so many chunks, as server-sent events, for anything posted.

python -m benchmarks.router.mock_http NUM_WORKERS NUM_CHUNKS      prints the ports, then serves until its input ends
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

_MODEL = {"id": "mock", "object": "model", "model_path": "mock", "served_model_name": "mock", "is_generation": True}
_ABOUT = json.dumps({"object": "list", "data": [_MODEL], "status": "ok", "version": "mock", **_MODEL}).encode()
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_ABOUT), _ABOUT)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _chunk(index: int) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": "word "}, "finish_reason": None}
    body = {"id": f"c-{index}", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice]}
    return _event(json.dumps(body).encode())


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, num_chunks: int) -> None:
        self._answer = [_HEAD + _chunk(0), *map(_chunk, range(1, num_chunks)), _event(b"[DONE]") + b"0\r\n\r\n"]
        self._received = bytearray()
        self._transport: Any = None  # uvloop's is no asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            if len(self._received) < end + 4 + length:
                return
            del self._received[: end + 4 + length]
            self._respond(head)

    def _respond(self, head: bytes) -> None:
        if head.startswith(b"get "):
            self._transport.write(_OK)
        elif b"/completions" not in head.split(b"\r\n")[0] or b"/render" in head.split(b"\r\n")[0]:
            self._transport.write(_NOT_FOUND)
        else:
            for part in self._answer:
                self._transport.write(part)


async def _serve(num_workers: int, num_chunks: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Engine(num_chunks), "127.0.0.1", 0) for _ in range(num_workers)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(*map(int, sys.argv[1:])))
