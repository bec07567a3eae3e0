"""A stand-in for `nixl._api`: agents of one process that copy memory, checked as strictly as NIXL does."""

import ctypes
import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Ending(enum.Enum):
    """How the next reads end."""

    AT_ONCE = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()
    IN_AN_ERROR = enum.auto()


@dataclass
class Network:
    """Agents that reach each other, and how their reads end."""

    agents: "dict[str, FakeAgent]" = field(default_factory=dict)
    ending: Ending = Ending.AT_ONCE
    may_be_ended: bool = True
    """Whether a read that has not ended can be."""
    num_connected: int = 0

    def nixl_agent(self, name: str, config: Any) -> "FakeAgent":
        agent = self.agents[name] = FakeAgent(name, self)
        return agent

    def memories_of_last(self) -> list[tuple[int, int]]:
        """Return what is registered with the agent that was made last."""
        return list(self.agents.values())[-1].memories

    def nixl_agent_config(self, *, backends: list[str]) -> list[str]:
        return backends


@dataclass
class _Read:
    targets: Any
    sources: Any
    num_polls: int = 0
    is_over: bool = False


class FakeAgent:
    """The part of NIXL's agent that is used."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.memories: list[tuple[int, int]] = []
        self._network = network
        self._remote: set[str] = set()

    def register_memory(self, spans: list[tuple[int, int, int, str]], memory: str) -> tuple[int, int]:
        assert memory == "DRAM"
        ((address, size, _device, _note),) = spans
        self.memories.append((address, size))
        return address, size

    def deregister_memory(self, handle: tuple[int, int]) -> None:
        self.memories.remove(handle)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self._network.agents:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self._remote.add(metadata.decode())
        self._network.num_connected += 1
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        self._remote.remove(name.decode())

    def get_xfer_descs(self, spans: Any, memory: str) -> Any:
        assert spans.dtype == np.uint64 and spans.shape[1] == 3 and memory == "DRAM"
        return spans

    def initialize_xfer(self, operation: str, targets: Any, sources: Any, name: bytes) -> _Read:
        assert operation == "READ" and name.decode() in self._remote
        _check(targets, self.memories)
        _check(sources, self._network.agents[name.decode()].memories)
        return _Read(targets, sources)

    def transfer(self, read: _Read) -> str:
        return self.check_xfer_state(read) if self._network.ending is Ending.AT_ONCE else "PROC"

    def check_xfer_state(self, read: _Read) -> str:
        read.num_polls += 1
        match self._network.ending:
            case Ending.NEVER:
                return "PROC"
            case Ending.IN_AN_ERROR:
                read.is_over = True
                return "ERR"
            case Ending.LATER if read.num_polls < 3:
                return "PROC"
        for (target, size, _), (source, _, _) in zip(read.targets.tolist(), read.sources.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        read.is_over = True
        return "DONE"

    def release_xfer_handle(self, read: _Read) -> None:
        if not read.is_over and not self._network.may_be_ended:
            raise RuntimeError("NIXL_ERR_BACKEND")


def _check(spans: Any, memories: list[tuple[int, int]]) -> None:
    for address, size, _device in spans.tolist():
        if not any(begin <= address and address + size <= begin + room for begin, room in memories):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
