"""Copies cached blocks of vLLM into staged blocks, by requests that vLLM never schedules.

Such a request wakes vLLM's scheduler. The connector looks the blocks up when the next step is planned, all ranks copy
them behind that step, and then the request is taken back. It needs no pages, and waits for no other request.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from common.ids import BlockId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.vllm.client import NotEntered, SampleSpec
from engine.vllm.errands import Errand, Staged
from engine.vllm.running import RunningVllm
from engine.vllm.work import Run

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Export:
    """One copy of blocks, under way; inside vLLM like a sample."""

    open_ranks: set[int]
    """Ranks that have not confirmed its end."""
    ended: asyncio.Future[int]
    """Resolves to the leading tokens whose KV is in the slots on all ranks."""
    _staged: list[int] = field(default_factory=list)

    def hear(self, staged: Staged, *, num_ranks: int) -> None:
        """Note that a rank has copied what vLLM had."""
        self._staged.append(staged.num_tokens)
        if len(self._staged) == num_ranks:
            self.ended.set_result(min(self._staged))

    def leave(self) -> None:
        """Note that vLLM does not have it any more."""
        if not self.ended.done():
            self.ended.set_result(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """See the module. Event loop only."""

    vllm: RunningVllm
    runs: MutableMapping[int, Run | Export]
    """Samples and exports inside vLLM, by key."""
    keys: Iterator[int]
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

    async def export(self, names: tuple[bytes, ...], slots: tuple[BlockId, ...]) -> int:
        """Copy cached blocks, by vLLM's names, into slots; returns how many leading ones vLLM still had."""
        key = next(self.keys)
        export = Export(set(range(self.vllm.num_ranks)), asyncio.get_running_loop().create_future())
        self.runs[key] = export
        errand = Errand(key=key, region_path=self.vllm.kv.region_path, slots=slots, exports=names)
        staying = self.spawn(self._stay(export, errand))
        num_tokens = await export.ended
        staying.cancel()
        return num_tokens // self.vllm.kv.shape.block_size

    async def _stay(self, export: Export, errand: Errand) -> None:
        """Keep a request inside vLLM until this is cancelled."""
        spec = SampleSpec(
            errand=errand,
            token_ids=as_tokens((0,)),
            num_prompt_tokens=1,
            sample_index=0,
            salt="",
            sampling=SamplingParams(max_tokens=1),
            stop_token_ids=frozenset(),
            max_new_tokens=1,
            wants_prompt_logprobs=False,
        )
        try:
            async for _output in self.vllm.client.generate(spec):
                pass
        except Exception as error:
            logger.warning("vLLM has failed to export cached blocks", exc_info=error)
            if isinstance(error, NotEntered):
                self.runs.pop(errand.key)
                export.leave()
