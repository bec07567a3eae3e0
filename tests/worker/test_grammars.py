"""Structured answers of one tenant neither wait for another one's grammars nor show by their times which they are."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from common.errors import InvalidRequest, Overloaded
from common.fake_tokenizer import byte_tokenizer
from common.ids import HashRoot
from common.structured_outputs import structure_text
from engine.fake import FakeExecutor
from engine.text.grammar import Grammar
from engine.text.grammar_trial import Verdict
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.calls import error_of, messages, spec_of
from tests.worker.cluster import running_pair
from worker import grammars
from worker.grammars import MAX_COMPILING, MAX_SIDE_BY_SIDE, GrammarCompiler

A, B = HashRoot(b"a" * 32), HashRoot(b"b" * 32)
TIMEOUT_S = 60.0


class Trials:
    """Trials that last as long as the test wants: those of structures in `held` until they are released."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        """Those that their callers have left."""
        self.held: dict[str, asyncio.Event] = {}
        self.refused: dict[str, str] = {}
        self.num_bytes = 0
        self.has_begun = asyncio.Condition()

    async def run(self, structure: str, spend: Callable[[float], None]) -> Verdict:
        self.begun.append(structure)
        async with self.has_begun:
            self.has_begun.notify_all()
        try:
            if structure in self.held:
                await self.held[structure].wait()
        except asyncio.CancelledError:
            self.ended.append(structure)
            raise
        finally:
            spend(1.5)
        return Verdict(reason=self.refused.get(structure, ""), num_bytes=self.num_bytes)

    async def until_begun(self, *structures: str) -> None:
        """Return when the trials of these structures have begun."""
        async with asyncio.timeout(TIMEOUT_S), self.has_begun:
            await self.has_begun.wait_for(lambda: set(structures) <= set(self.begun))

    async def aclose(self) -> None:
        pass


@pytest.fixture(name="trials")
def _trials() -> Trials:
    return Trials()


@pytest.fixture(name="compiler")
async def _compiler(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarCompiler]:
    monkeypatch.setattr(grammars, "GrammarTrials", lambda _grammars: trials)
    monkeypatch.setattr(grammars, "WAIT_S", TIMEOUT_S)
    compiler = GrammarCompiler(byte_tokenizer(), FakeExecutor(num_blocks=8, block_size=BLOCK_SIZE))
    yield compiler
    await compiler.aclose()


def structures(num: int) -> list[str]:
    return [structure_text({"choice": [f"answer {number}"]}) for number in range(num)]


def starting(compiler: GrammarCompiler, names: list[str], root: HashRoot) -> "list[asyncio.Task[Grammar]]":
    return [asyncio.create_task(compiler.compile(name, b"", root=root)) for name in names]


async def test_answers_of_a_tenant_do_not_wait_for_the_grammars_of_another(
    compiler: GrammarCompiler, trials: Trials
) -> None:
    known, new, *slow = structures(8)
    await compiler.compile(known, b"", root=B)
    trials.held = {name: asyncio.Event() for name in slow}
    waiting = starting(compiler, slow, A)
    await trials.until_begun(slow[0])
    async with asyncio.timeout(TIMEOUT_S):
        for name in (new, known):
            await compiler.compile(name, b"", root=B)
    assert set(trials.begun) == {known, new, slow[0]}
    for task in waiting:
        task.cancel()


async def test_tenants_take_turns_when_all_places_are_taken(compiler: GrammarCompiler, trials: Trials) -> None:
    roots = [HashRoot(bytes([number] * 32)) for number in range(MAX_SIDE_BY_SIDE)]
    mine, *theirs = structures(2 * MAX_SIDE_BY_SIDE + 1)
    trials.held = {name: asyncio.Event() for name in theirs}
    waiting = [task for root in roots for task in starting(compiler, [theirs.pop(), theirs.pop()], root)]
    first = [*trials.held][1::2]
    await trials.until_begun(*first)
    late = asyncio.create_task(compiler.compile(mine, b"", root=B))
    trials.held[first[0]].set()  # its tenant has another one, which arrived before
    async with asyncio.timeout(TIMEOUT_S):
        await late
    for task in waiting:
        task.cancel()


@pytest.mark.parametrize("reason", ["", "it cannot be"])
async def test_tenant_waits_for_a_grammar_as_if_no_other_had_used_it(
    compiler: GrammarCompiler, trials: Trials, reason: str
) -> None:
    (name,) = structures(1)
    trials.refused = {name: reason}
    for root in (A, A, B, B):
        if reason:
            with pytest.raises(InvalidRequest, match=reason):
                await compiler.compile(name, b"", root=root)
        else:
            await compiler.compile(name, b"", root=root)
    assert trials.begun == [name, name]


async def test_tenant_with_too_many_grammars_is_refused_until_some_are_compiled(
    compiler: GrammarCompiler, trials: Trials
) -> None:
    *first, last = structures(MAX_COMPILING + 1)
    trials.held = {name: asyncio.Event() for name in first}
    waiting = starting(compiler, first, A)
    await trials.until_begun(first[0])
    with pytest.raises(Overloaded) as refusal:
        await compiler.compile(last, b"", root=A)
    assert refusal.value.retry_after_s
    trials.held[first[0]].set()
    await waiting[0]
    assert await asyncio.wait_for(compiler.compile(last, b"", root=B), TIMEOUT_S)
    for task in waiting:
        task.cancel()


async def test_trial_ends_with_the_last_of_its_requests_and_begins_anew(
    compiler: GrammarCompiler, trials: Trials
) -> None:
    (name,) = structures(1)
    trials.held = {name: asyncio.Event()}
    first, second = starting(compiler, [name, name], A)
    await trials.until_begun(name)
    first.cancel()
    await asyncio.wait((first,))
    assert not trials.ended
    second.cancel()
    await asyncio.wait((second,))
    trials.held.clear()
    await compiler.compile(name, b"", root=A)
    assert trials.ended == [name]
    assert trials.begun == [name, name]
    assert compiler.take_spent_s(A) >= 3.0  # of the abandoned one, too


async def test_grammars_of_a_tenant_displace_only_its_own(
    compiler: GrammarCompiler, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.num_bytes = 1 << 20
    monkeypatch.setattr(grammars, "MAX_KNOWN_BYTES", 4 << 20)
    mine, *theirs = structures(6)
    await compiler.compile(mine, b"", root=B)
    for name in theirs:
        await compiler.compile(name, b"", root=A)
    await compiler.compile(mine, b"", root=B)
    await compiler.compile(theirs[-1], b"", root=A)
    assert trials.begun == [mine, *theirs]
    await compiler.compile(theirs[0], b"", root=A)
    assert trials.begun == [mine, *theirs, theirs[0]]


async def test_routers_learn_what_compiling_has_cost_once_also_when_it_is_refused() -> None:
    taken = make_request([1, 2, 3], structured_outputs=structure_text({"choice": ["yes", "no"]}))
    refused = spec_of(taken)
    refused.sampling.structured_outputs = structure_text({"grammar": "start: start"})
    async with running_pair() as pair:
        told = [
            message.reserved.compile_s
            for _ in range(2)
            async for message in messages(pair.open_decode_of(spec_of(taken)))
            if message.HasField("reserved")
        ]
        error = await error_of(pair.open_decode_of(refused))
    assert told[0] > 0
    assert told[1] == 0
    assert error.spent_s > 0
