"""A player under virtual time, with a scripted target."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.tokens import TokenArray
from measure.load.player import Player, RequestTerms, Tools
from measure.load.records import PoolSample, RequestRecord, ServerReport
from measure.load.targets.interface import (
    ChunkSink,
    PreparedCall,
    TargetAnswer,
    TargetInfo,
    TargetRequest,
    TargetSpec,
)
from measure.simulate.loop import VirtualClock, VirtualLoop
from measure.workload.sessions import Content, Segment

_T = TypeVar("_T")

ORIGIN_S = 100.0


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run `main` on a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


class CountingWriter:
    """Writes unit i of content c as c + i."""

    def tokens(self, segments: Sequence[Segment]) -> TokenArray:
        return array("I", [(s.content + i) % (1 << 32) for s in segments for i in range(s.num_tokens)])

    def text(self, segments: Sequence[Segment]) -> str:
        return " ".join(f"c{s.content}" for s in segments)


@dataclass(slots=True)
class ScriptedTarget:
    """Answers with tokens 1, 2, … at a given pace, or fails."""

    ttft_s: float = 0.1
    gap_s: float = 0.01
    tells_ids: bool = True
    failures: dict[int, Exception] = field(default_factory=dict)
    """Errors by number of the call, raised after `ttft_s`."""
    stall: tuple[float, float] | None = None
    """Interval of the run in which no answer begins."""
    requests: list[TargetRequest] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    num_cancelled: int = 0
    name: str = "scripted"
    spec: TargetSpec = field(default_factory=lambda: TargetSpec(url="scripted"))

    async def describe(self) -> TargetInfo:
        return TargetInfo(system="scripted", model="m", max_model_len=None, vocab_size=None, num_workers={})

    def prepare(self, request: TargetRequest) -> PreparedCall:
        async def call(on_chunk: ChunkSink) -> TargetAnswer:
            number = len(self.requests)
            self.requests.append(request)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            try:
                return await self._answer(request, on_chunk, self.failures.get(number))
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            finally:
                self.num_running -= 1

        return call

    async def sample(self, at_s: float) -> PoolSample | None:
        return None

    async def aclose(self) -> None:
        """Do nothing."""

    async def _answer(self, request: TargetRequest, on_chunk: ChunkSink, failure: Exception | None) -> TargetAnswer:
        now_s = asyncio.get_running_loop().time() - ORIGIN_S
        if self.stall is not None and self.stall[0] <= now_s < self.stall[1]:
            await asyncio.sleep(self.stall[1] - now_s)
        await asyncio.sleep(self.ttft_s)
        if failure is not None:
            raise failure
        for number in range(request.num_output_tokens):
            if number:
                await asyncio.sleep(self.gap_s)
            on_chunk(1)
        ids = tuple(range(1, request.num_output_tokens + 1))
        return TargetAnswer(
            text=" ".join(map(str, ids)),
            token_ids=ids if self.tells_ids else None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            report=ServerReport(),
        )


@dataclass(slots=True)
class Told:
    """A reporter that records everything."""

    records: list[RequestRecord] = field(default_factory=list)
    over: list[int | None] = field(default_factory=list)

    def record(self, request: RequestRecord) -> None:
        self.records.append(request)

    def session_over(self, stream: int | None) -> None:
        self.over.append(stream)


def terms(*, content: Content = Content.TOKENS) -> RequestTerms:
    return RequestTerms(content=content, seed=1, origin_s=ORIGIN_S, timeout_s=30.0, slo=None)


@asynccontextmanager
async def playing(target: ScriptedTarget, told: Told, agreed: RequestTerms | None = None) -> AsyncIterator[Player]:
    """Yield a player whose run begins now; leaving waits for all its sessions."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await asyncio.sleep(ORIGIN_S - loop.time())
    tools = Tools(target=target, writer=CountingWriter(), clock=VirtualClock(loop))
    async with asyncio.TaskGroup() as tasks:
        yield Player(tools, agreed or terms(), told, tasks)
