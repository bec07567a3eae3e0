"""Reads what clients send: small requests at once, others in child processes, where tenants have fair turns.

Parsing holds the interpreter lock as long as it takes, and some megabytes of small values take seconds. In a child it
delays no other request, and one that needs too much time or memory fails alone. A child answers with the record that
the reading returns, in MessagePack, or with the reason why there is none.
"""

import gc
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import msgpack
from google.protobuf.message import Message

from common.errors import InvalidRequest, Overloaded
from common.sandbox import Sandbox, SandboxFailed, serve
from kvrelay.v1 import inference_pb2 as pb
from router.reading.fair_threads import FairThreads
from router.tenants import Tenant

INLINE_BYTES = 1 << 14
"""Larger JSON is read in a child: so many bytes take up to some milliseconds."""
INLINE_MESSAGE_BYTES = 1 << 16
"""The same for protobuf."""
_CPU_S = 10.0
"""CPU time that one request may take; 4 MiB take 2 s at worst."""
_WALL_S = 30.0
_MEMORY_BYTES = 1 << 30
"""Memory that one request may take; 4 MiB take 0.4 GiB at worst."""
_NUM_CHILDREN = 2
_RETRY_S = 1.0
_MESSAGES: tuple[type[Message], ...] = (
    pb.GenerateRequest,
    pb.EmbedRequest,
    pb.ChatPrompt,
    pb.TokenIds,
    pb.TokenizeRequest,
)
"""Messages in records; their places are their codes on the pipe."""
_MAPPING = len(_MESSAGES)
"""Code of a mapping of JSON."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A pure function from bytes to a message, or to a record of messages and plain values."""

    read: Callable[[bytes], T]
    """A function of a module; raises InvalidRequest."""
    kind: type[T]
    """Type of its result."""
    inline_bytes: int = INLINE_BYTES

    @property
    def name(self) -> str:
        """Return the name by which the child finds the function."""
        return f"{self.read.__module__}:{self.read.__qualname__}"


class Readers:
    """The children and their fair line. Event loop only."""

    def __init__(self) -> None:
        self._threads = FairThreads(_NUM_CHILDREN, name="read")
        self._idle: SimpleQueue[Sandbox] = SimpleQueue()
        self._sandboxes = [Sandbox("router.doors.readers") for _ in range(_NUM_CHILDREN)]
        for sandbox in self._sandboxes:
            self._idle.put(sandbox)

    async def read(self, reading: Reading[T], raw: bytes, *, tenant: Tenant) -> T:
        """Return what the reading makes of a request. Raises InvalidRequest, and Overloaded on a host too busy."""
        if len(raw) <= reading.inline_bytes:
            return reading.read(raw)
        return await self._threads.run(partial(self._ask, reading, raw), tenant=tenant, num_chars=len(raw))

    def start(self) -> None:
        """Begin to start a child before it is needed."""
        self._threads.begin(self._start)

    def _start(self) -> None:
        sandbox = self._idle.get()
        try:
            sandbox.start()
        finally:
            self._idle.put(sandbox)

    def close(self) -> None:
        """End the children; only small requests can be read any more."""
        self._threads.close()
        for sandbox in self._sandboxes:
            sandbox.close()

    def _ask(self, reading: Reading[T], raw: bytes) -> T:
        sandbox = self._idle.get()
        try:
            answer = sandbox.ask(reading.name.encode() + b"\n" + raw, within_s=_WALL_S)
        except TimeoutError:
            raise Overloaded("the host is too busy to read the request", retry_after_s=_RETRY_S) from None
        except SandboxFailed as failure:
            if failure.took_too_long:
                raise InvalidRequest("cannot read the request: it takes too much time; send less") from None
            raise Overloaded("the process that read the request has ended", retry_after_s=_RETRY_S) from None
        finally:
            self._idle.put(sandbox)
        return _unpacked(reading.kind, answer)


def _packed(record: Any) -> bytes:
    """Return the bytes for a record that was read."""
    if is_dataclass(record):
        values: Any = {each.name: _plain(getattr(record, each.name)) for each in fields(record)}
    else:
        values = record
    return bytes(msgpack.packb([values, None], default=_extended))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return msgpack.ExtType(_MAPPING, json.dumps(value).encode())
    return value


def _extended(value: Any) -> Any:
    if isinstance(value, Message):
        return msgpack.ExtType(_MESSAGES.index(type(value)), value.SerializeToString())
    raise TypeError(f"{type(value).__name__} cannot be in a record that is read")


def _refused(error: InvalidRequest) -> bytes:
    return bytes(msgpack.packb([None, [error.message, error.field]]))


def _unpacked(kind: type[T], answer: bytes) -> T:
    """Return the record in a child's answer. Raises InvalidRequest if there is none."""
    values, refusal = msgpack.unpackb(answer, ext_hook=_whole, use_list=False, strict_map_key=False)
    if refusal is not None:
        message, field = refusal
        raise InvalidRequest(message, field=field)
    return values if isinstance(values, kind) else kind(**values)


def _whole(code: int, data: bytes) -> Any:
    return json.loads(data) if code == _MAPPING else _MESSAGES[code].FromString(data)


def _answer(request: bytes) -> bytes:
    name, _, raw = request.partition(b"\n")
    module, _, function = name.decode().partition(":")
    try:
        return _packed(getattr(importlib.import_module(module), function)(raw))
    except InvalidRequest as error:
        return _refused(error)
    except MemoryError:
        return _refused(InvalidRequest("cannot read the request: it takes too much memory; send less"))


def main() -> None:
    """Read requests for the parent."""
    gc.disable()  # what is read has no cycles, and looking for some takes half of the time
    serve(_answer, cpu_s=_CPU_S, memory_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    main()
