"""Calls of the CUDA driver, against a library of three cards that is not there."""

import ctypes
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.device import driver
from engine.device.driver import CudaDriver

READS = {(0, 2)}
"""Pairs of cards of which the first reads the second."""


def uuid_of(card: int) -> str:
    return str(uuid.UUID(int=card))


def library() -> SimpleNamespace:
    def set_to(target: Any, value: int) -> int:
        target._obj.value = value  # noqa: SLF001 - what byref refers to
        return 0

    def set_uuid(target: Any, card: Any) -> int:
        ctypes.memmove(target._obj.bytes, uuid.UUID(int=card.value).bytes, 16)  # noqa: SLF001
        return 0

    calls: dict[str, Any] = {name: lambda *_: 0 for name in driver._ENTRY_POINTS}  # noqa: SLF001
    calls["cuDeviceGetCount"] = lambda target: set_to(target, 3)
    calls["cuDeviceGet"] = lambda target, index: set_to(target, index or 0)
    calls["cuDeviceGetUuid_v2"] = set_uuid
    calls["cuDeviceCanAccessPeer"] = lambda target, own, peer: set_to(target, (own.value, peer.value) in READS)
    return SimpleNamespace(**calls)


@pytest.mark.parametrize(("card", "readable"), [(0, [0, 2]), (1, [1]), (2, [2])])
def test_driver_names_its_card_and_those_that_it_reads(
    card: int, readable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library())
    made = CudaDriver(torch.device("cuda", card))
    assert made.device_uuid == uuid_of(card)
    assert made.readable_devices == tuple(map(uuid_of, readable))


def test_view_of_memory_shares_it_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library())
    memory = torch.arange(16, dtype=torch.uint8)
    view = CudaDriver(torch.device("cpu")).view(memory.data_ptr() + 4, 8)
    memory[5] = 99
    assert view.tolist() == memory[4:12].tolist()
