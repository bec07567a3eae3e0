"""A vLLM of the tests' own: what its processes say, and when, is up to the test."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from common.clock import SystemClock
from common.timing import StepShape
from engine.events import EngineEvent, StepReport, TokenOutput, Tokens
from engine.kv_store import KvShape
from engine.options import CheckpointInfo
from engine.steps.scheduler import SchedulerLimits
from engine.vllm.client import NotEntered, SampleOutput, SampleSpec
from engine.vllm.engine import VllmEngine
from engine.vllm.errands import Closed, Report, Staged, StepBegun, encode_report
from engine.vllm.running import Pipes, RunningVllm
from engine.vllm.staging import StagedStore

BLOCK_SIZE = 4
SHAPE = KvShape(
    num_layers=2, num_kv_heads=1, head_dim=6, block_size=BLOCK_SIZE, dtype="float32", row_bytes=24, fingerprint="fake"
)


class FakeClient:
    """Yields the tokens that `say` gives it."""

    def __init__(self) -> None:
        self.specs: dict[int, SampleSpec] = {}
        self.ended: list[int] = []
        """Samples that were ended before their last token, by key."""
        self.is_broken = False
        self.may_end = asyncio.Event()
        """Whether vLLM hears of ends; cleared, they wait as behind a request that is still being added."""
        self.may_end.set()
        self._outputs: dict[int, asyncio.Queue[SampleOutput | Exception]] = {}

    def say(self, key: int, *token_ids: int, end: str = "") -> None:
        """Let a sample go on."""
        logprobs = (None,) * len(token_ids)
        self._queue(key).put_nowait(SampleOutput(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=(), end=end))

    def fail(self, key: int) -> None:
        """Let a sample fail."""
        self._queue(key).put_nowait(RuntimeError("no"))

    def refuse(self, key: int) -> None:
        """Do not take a sample."""
        self._queue(key).put_nowait(NotEntered("too long for it"))

    def _queue(self, key: int) -> "asyncio.Queue[SampleOutput | Exception]":
        return self._outputs.setdefault(key, asyncio.Queue())

    async def generate(self, spec: SampleSpec) -> AsyncIterator[SampleOutput]:
        self.specs[spec.errand.key] = spec
        end = ""
        try:
            while not end:
                output = await self._queue(spec.errand.key).get()
                if isinstance(output, Exception):
                    raise output
                end = output.end
                yield output
        finally:
            if not end:
                await self.may_end.wait()
                self.ended.append(spec.errand.key)

    def shutdown(self) -> None:
        """Do nothing."""


class FakeVllm:
    """An engine over a fake client, and everything that it has said."""

    def __init__(self, *, num_blocks: int = 16, num_ranks: int = 1, max_running: int = 8) -> None:
        self.client = FakeClient()
        self.pipes = Pipes.open(num_ranks)
        self.kv = StagedStore(SHAPE, num_blocks, page_order="")
        self.num_ranks = num_ranks
        info = CheckpointInfo(name="fake", vocab_size=1000, max_model_len=64, eos_token_ids=frozenset({0}))
        running = RunningVllm(
            client=self.client,
            pipes=self.pipes,
            kv=self.kv,
            num_blocks=num_blocks,
            num_ranks=num_ranks,
            info=info,
        )
        limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=64, max_running=max_running, max_waiting=2)
        self.engine = VllmEngine(running, limits, SystemClock())
        self.reports: list[StepReport] = []
        self.faults: list[Exception] = []
        self.engine.open(self.reports.append, self.faults.append)

    async def report(self, *reports: Report) -> None:
        """Let vLLM's processes report, and the engine hear it."""
        for report in reports:
            idx = 1 + report.rank if isinstance(report, Closed | Staged) else 0
            os.write(self.pipes.writing[idx], encode_report(report))
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(8):
            await asyncio.sleep(0)

    async def close(self, *keys: int) -> None:
        """Let all ranks confirm the end of samples."""
        await self.report(*(Closed(rank=rank, keys=keys) for rank in range(self.num_ranks)))

    async def stage(self, key: int, num_tokens: int) -> None:
        """Let all ranks copy a request's KV."""
        await self.report(*(Staged(rank=rank, key=key, num_tokens=num_tokens) for rank in range(self.num_ranks)))

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds pages or slots."""
        load = self.engine.load()
        return load.num_used_blocks == 0 and self.kv.num_free == self.kv.num_blocks and load.num_running == 0

    async def aclose(self) -> None:
        """End the engine."""
        await self.engine.aclose()


def step(**changes: Any) -> StepBegun:
    """Return the report of a step."""
    plain = StepBegun(
        shape=StepShape(),
        started=(),
        computed=(),
        changes=(),
        is_cleared=False,
        preempted=(),
        num_free_pages=1_000_000,
    )
    return replace(plain, **changes)


def tokens_in(events: list[EngineEvent]) -> list[TokenOutput]:
    """Return the tokens of events."""
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]
