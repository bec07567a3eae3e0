"""Drives a `VllmEngine`: vLLM steps by itself, so commands run at once, on the event loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from common.block_hash import BlockHashes
from engine.interface import Engine
from engine.steps.landing import Pinned
from engine.thread import EngineDriver, EngineSetup, RunningStep
from engine.vllm.engine import VllmEngine
from engine.vllm.running import RunningVllm

logger = logging.getLogger(__name__)

T = TypeVar("T")


class VllmDriver(EngineDriver):
    """See the module."""

    def __init__(self, core: VllmEngine, setup: EngineSetup) -> None:
        self.core: VllmEngine = core
        self._setup = setup

    @classmethod
    def of(cls, vllm: RunningVllm, setup: EngineSetup) -> "VllmDriver":
        """Return the driver of a vLLM that runs; a `DriverFactory`."""
        return cls(VllmEngine(vllm, setup.limits, setup.clock), setup)

    @property
    def running_step(self) -> RunningStep | None:  # type: ignore[override]  # read only
        """See `EngineDriver`."""
        return self.core.running_step

    def start(self) -> None:
        """See `EngineDriver`."""
        self.core.open(self._setup.on_report, self._setup.on_fault)

    async def aclose(self) -> None:
        """See `EngineDriver`."""
        await self.core.aclose()

    def post(self, command: Callable[[Engine], object]) -> None:
        """See `EngineDriver`. In a turn of its own: the caller may be in the middle of an event of the engine."""
        asyncio.get_running_loop().call_soon(self._run, command)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """See `EngineDriver`. Behind the commands that were posted before."""
        await asyncio.sleep(0)
        return command(self.core)

    async def pin(self, hashes: BlockHashes) -> Pinned:
        """See `EngineDriver`."""
        landings = self.core.landings
        pinning = asyncio.ensure_future(landings.pin(hashes))
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(lambda pinned: landings.unpin(pinned.result()))
            raise

    def _run(self, command: Callable[[Engine], object]) -> None:
        try:
            command(self.core)
        except Exception as error:  # the top of a callback
            logger.critical("a command of the worker failed", exc_info=True)
            self._setup.on_fault(error)
