"""Compiles the grammars of structured answers, off a worker's event loop and fairly by tenant.

Tenants go by the root of their block hashes, which is one and the same for all requests of a tenant, from every router,
and differs between any two that do not share their cache.

1. What a structure compiles to, or why it is refused, is remembered by tenant: times reveal to none what another has
   asked for. Whatever is remembered is found at once. Memory is bounded; the tenant that takes most gives way.
2. A new structure is tried in another process first, since hostile ones take long, or crash, and then compiled. Tenants
   take turns, a structure each; within a tenant, structures go in order of arrival, and further ones are refused.
3. Requests for one structure wait for one compilation. It ends when they have left, unless its trial is over.
4. CPU seconds are counted by tenant, those of abandoned work as well, and told to a router with the next answer.
"""

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import tokenizers

from common.errors import InvalidRequest, Overloaded
from common.ids import HashRoot
from common.structured_outputs import FIELD
from common.wire import unpack_tokens
from engine.interface import ServedModel
from engine.text.grammar import Grammar, Grammars
from engine.text.grammar_trial import GrammarTrials

MAX_SIDE_BY_SIDE = 4
"""Tenants whose structures are compiled at the same time."""
MAX_COMPILING = 8
"""Structures of one tenant that are compiled or wait for it."""
WAIT_S = 6.0
"""Longest wait for the structures before: well below the time after which routers give a worker up."""
MAX_KNOWN_BYTES = 256 << 20
"""Memory of everything that is remembered."""
MIN_GRAMMAR_BYTES = 256 << 10
"""Least that a grammar is counted as: the smallest ones cannot be measured."""

_Result = TypeVar("_Result")
_Outcome: TypeAlias = Grammar | str
"""A compiled grammar, or the reason why there is none."""


@dataclass(slots=True, eq=False)
class _Compilation:
    task: "asyncio.Task[_Outcome]" = field(init=False)
    num_waiting: int = 0
    """Requests."""
    has_passed: bool = False
    """Whether the trial is over: the rest of the work cannot be ended."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """What is remembered of one tenant, and what is compiled for it."""

    known: OrderedDict[str, tuple[_Outcome, int]] = field(default_factory=OrderedDict)
    """Outcomes by structure with their bytes, the one used longest ago first."""
    num_bytes: int = 0
    compiling: dict[str, _Compilation] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn_s: float = 1.0
    """Duration of the latest turn."""
    spent_s: float = 0.0
    """CPU seconds that no router knows of yet."""

    def spend(self, cpu_s: float) -> None:
        """Count CPU seconds."""
        self.spent_s += cpu_s

    def remember(self, structure: str, outcome: _Outcome, num_bytes: int) -> None:
        """Remember an outcome that was not known."""
        self.known[structure] = (outcome, num_bytes)
        self.num_bytes += num_bytes

    def forget_oldest(self) -> None:
        """Forget the outcome that was used longest ago."""
        _structure, (_outcome, num_bytes) = self.known.popitem(last=False)
        self.num_bytes -= num_bytes


class GrammarCompiler:
    """Compiles for one worker. Event loop only; threads and the process for trials begin when they are needed."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, executor: ServedModel) -> None:
        self._vocab_size = executor.vocab_size
        self._grammars = Grammars(tokenizer, vocab_size=self._vocab_size, eos_token_ids=executor.eos_token_ids)
        self._trials = GrammarTrials(self._grammars)
        # Apart from the threads that move KV, which a flood of grammars would hold up. The last one is for `check`.
        self._threads = ThreadPoolExecutor(MAX_SIDE_BY_SIDE + 1, thread_name_prefix="grammar")
        self._turns = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        self._tenants: dict[HashRoot, _Tenant] = {}

    async def compile(self, structure: str, output: bytes, *, root: HashRoot) -> Grammar:
        """Return the grammar of a structure, which the packed tokens of an answer begun elsewhere follow.

        `root` names the tenant. Raises InvalidRequest, and Overloaded when too much is to be compiled before.
        """
        tenant = self._tenants.setdefault(root, _Tenant())
        known = tenant.known.get(structure)
        if known is not None:
            outcome, _num_bytes = known
            tenant.known.move_to_end(structure)
        else:
            outcome = await self._compiled(tenant, structure)
        if isinstance(outcome, str):
            raise InvalidRequest(outcome, field=FIELD, spent_s=self.take_spent_s(root))
        if output:
            token_ids = unpack_tokens(output, vocab_size=self._vocab_size, field="sequence.output_tokens")
            await self._on_thread(tenant, partial(outcome.check, token_ids))
        return outcome

    def take_spent_s(self, root: HashRoot) -> float:
        """Return the CPU seconds that compiling has taken for a tenant since the last call."""
        tenant = self._tenants.get(root)
        if tenant is None:
            return 0.0
        spent_s, tenant.spent_s = tenant.spent_s, 0.0
        return spent_s

    async def aclose(self) -> None:
        """End the threads and the process, if there are any."""
        await asyncio.to_thread(self._threads.shutdown)
        await self._trials.aclose()

    async def _compiled(self, tenant: _Tenant, structure: str) -> _Outcome:
        """Return the outcome for a structure that is not known. Raises Overloaded."""
        mine = tenant.compiling.get(structure)
        if mine is None:
            if len(tenant.compiling) >= MAX_COMPILING:
                reason = f"{MAX_COMPILING} other structured_outputs of this tenant are to be compiled before"
                raise Overloaded(reason, retry_after_s=tenant.turn_s)
            mine = tenant.compiling[structure] = _Compilation()
            mine.task = asyncio.create_task(self._compile(tenant, structure, mine))
            mine.task.add_done_callback(partial(_leave, tenant, structure, mine))
        mine.num_waiting += 1
        try:
            return await asyncio.shield(mine.task)
        finally:
            mine.num_waiting -= 1
            if not (mine.num_waiting or mine.has_passed):
                mine.task.cancel()
                _leave(tenant, structure, mine)  # the next request begins anew

    async def _compile(self, tenant: _Tenant, structure: str, mine: _Compilation) -> _Outcome:
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(WAIT_S):
                    await turn.enter_async_context(tenant.turn)
                    await turn.enter_async_context(self._turns)  # in order of arrival, one of each tenant
            except TimeoutError:
                raise Overloaded("other structured_outputs take long", retry_after_s=tenant.turn_s) from None
            started_s = time.monotonic()
            verdict = await self._trials.run(structure, tenant.spend)
            outcome: _Outcome = verdict.reason
            num_bytes = sys.getsizeof(structure)
            if not outcome:
                mine.has_passed = True
                outcome = await self._on_thread(tenant, partial(self._grammars.compile, structure))
                num_bytes += max(MIN_GRAMMAR_BYTES, verdict.num_bytes)
            tenant.turn_s = time.monotonic() - started_s
        tenant.remember(structure, outcome, num_bytes)
        while sum(each.num_bytes for each in self._tenants.values()) > MAX_KNOWN_BYTES:
            max(self._tenants.values(), key=lambda each: each.num_bytes).forget_oldest()
        return outcome

    async def _on_thread(self, tenant: _Tenant, work: Callable[[], _Result]) -> _Result:
        """Do work for a tenant, and count it."""

        def timed() -> tuple[_Result, float]:
            started_s = time.thread_time()
            return work(), time.thread_time() - started_s

        result, cpu_s = await asyncio.get_running_loop().run_in_executor(self._threads, timed)
        tenant.spend(cpu_s)
        return result


def _leave(tenant: _Tenant, structure: str, mine: _Compilation, *_done: object) -> None:
    if tenant.compiling.get(structure) is mine:
        del tenant.compiling[structure]
