"""Pages and slots are given out once, and all come back, in whatever order calls, vLLM and its ranks act."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.events import EngineEvent
from engine.sequence import SequenceState
from engine.steps.group import Group
from engine.vllm.errands import Closed, Staged
from tests.builders import make_request
from tests.engine.vllm.fake_vllm import BLOCK_SIZE, FakeVllm, step

NUM_RANKS = 2
MOVES = (
    *("add", "add_prefill_only", "reserve", "start", "cancel", "finish"),
    *("plan", "copy", "say", "end", "fail", "close", "outgrow"),
)


class Play:
    """One vLLM that does what it may, and calls that do what they like."""

    def __init__(self) -> None:
        self.vllm = FakeVllm(num_blocks=16, num_ranks=NUM_RANKS, max_running=6)
        self.groups: list[Group] = []
        self.planned: set[int] = set()
        self.loaded: set[tuple[int, int]] = set()
        """(rank, key) of the loads that are done."""
        self.over: set[int] = set()
        """Samples that vLLM has ended by itself."""
        self.closed: Counter[int] = Counter()
        """Ranks that have confirmed the end of a sample; they do in turn."""

    async def move(self, name: str, which: int, size: int) -> None:
        """Do something with one of the groups or samples, if it can be done."""
        engine, client = self.vllm.engine, self.vllm.client
        group = self.groups[which % len(self.groups)] if self.groups else None
        alive = [key for key in client.specs if not self.closed[key]]
        key = alive[which % len(alive)] if alive else 0
        running = key and key not in self.over and key not in client.ended
        match name:
            case "add" | "add_prefill_only" | "reserve":
                request = make_request(range(1, 1 + size), block_size=BLOCK_SIZE, n=1 + which % 3, salt=f"{which}")
                landing = engine.arrive(request.block_hashes[: which % 4])
                if name != "reserve" and engine.landings.reserve(landing) is None and landing.num_missing_blocks:
                    engine.landings.commit(landing, len(landing.hashes))
                told = () if name == "reserve" else (landing,)
                if isinstance(entered := getattr(engine, name)(request, _ignore, *told), Group):
                    self.groups.append(entered)
                engine.landings.release(landing)
            case "start" if group is not None and group.leader.state is SequenceState.RESERVED:
                engine.commit(group, group.leader.num_tokens)
                engine.start(group, [(9, (size + i) % 3 == 0) for i in range(group.request.sampling.n)])
            case "cancel" if group is not None:
                engine.cancel(group)
            case "finish" if group is not None:
                engine.finish_sample(group, size % 3)
            case "plan" if running and key not in self.planned:
                self.planned.add(key)
                await self.vllm.report(step(started=((key, 0),)))
            case "copy" if key in self.planned:
                await self._copy(key, size)
            case "say" if running:
                client.say(key, 7)
            case "end" if running:
                self.over.add(key)
                client.say(key, 7, end="length")
            case "fail" if running:
                client.fail(key)
            case "outgrow":
                begun = [key for key in alive if key in self.planned and key not in client.ended]
                await self.vllm.report(step(num_free_pages=size % 4, preempted=tuple(begun[:which])))
            case "close":
                await self.close()
        await self.vllm.settle()
        free = self.vllm.kv._free  # noqa: SLF001 - a slot that is freed twice is given to two requests
        assert len(set(free)) == len(free) <= self.vllm.kv.num_blocks

    async def _copy(self, key: int, size: int) -> None:
        errand = self.vllm.client.specs[key].errand
        rank = size % NUM_RANKS
        if errand.num_loaded and (rank, key) not in self.loaded:
            self.loaded.add((rank, key))
            await self.vllm.report(Staged(rank=rank, key=key, num_tokens=errand.num_loaded))
        elif errand.stores:
            num_tokens = len(self.vllm.client.specs[key].token_ids)
            await self.vllm.report(Staged(rank=rank, key=key, num_tokens=num_tokens))

    async def close(self) -> None:
        """Let the next rank of each ended sample confirm it."""
        for key in self.over.union(self.vllm.client.ended):
            if self.closed[key] < NUM_RANKS:
                self.closed[key] += 1
                await self.vllm.report(Closed(rank=self.closed[key] - 1, keys=(key,)))

    async def end(self) -> None:
        """Cancel everything, and let vLLM confirm it."""
        for group in self.groups:
            self.vllm.engine.cancel(group)
        await self.vllm.settle()
        for _ in range(NUM_RANKS):
            await self.close()
        await self.vllm.settle()
        assert self.vllm.is_empty
        assert not self.vllm.faults
        assert self.vllm.engine.load().num_waiting == self.vllm.engine.load().num_reserved == 0
        await self.vllm.aclose()


def _ignore(_event: EngineEvent) -> None:
    pass


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 5), st.integers(1, 20)), max_size=40))
def test_everything_comes_back_whatever_the_order(moves: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        game = Play()
        for move in moves:
            await game.move(*move)
        await game.end()

    asyncio.run(play())
