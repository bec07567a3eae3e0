"""gRPC's wake-ups are taken together, so that its thread never stands while the loop is busy."""

import asyncio
import socket
from collections.abc import Callable

import grpc
import pytest

from common import event_loop


def test_wake_ups_that_pile_up_in_one_turn_leave_nothing_to_read() -> None:
    async def many_calls() -> tuple[int, bytes]:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        num_handled, handled = 0, asyncio.Event()

        class Poller:
            def handle(self) -> None:
                nonlocal num_handled
                num_handled += len(reader.recv(1))
                handled.set()

        Poller.__module__ = grpc.aio.__name__
        with reader, writer:
            for _ in range(200):
                writer.send(b"1")
            asyncio.get_running_loop().add_reader(reader, Poller().handle)
            await handled.wait()
            asyncio.get_running_loop().remove_reader(reader)
            writer.send(b"2")
            return num_handled, reader.recv(999)

    assert event_loop.run(many_calls()) == (1, b"2")


def test_reader_that_grpc_registers_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[socket.socket] = []

    def note(wake_ups: socket.socket, handle: Callable[..., None], *args: object) -> None:
        registered.append(wake_ups)
        handle(*args)

    async def call_nobody() -> None:
        async with grpc.aio.insecure_channel("unix:/nobody-listens-here") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/a.B/C", bytes, bytes)(b"")

    monkeypatch.setattr(event_loop, "_call_once", note)
    event_loop.run(call_nobody())
    assert registered, "an operation ended, and gRPC's reader was not the one that was told"
