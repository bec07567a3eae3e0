"""Tokenizing for many tenants: none waits behind all work of another, and short work never behind long work."""

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from router.reading.fair_threads import LONG_CHARS, FairThreads
from router.tenants import Tenant

A, B, HEAVY = Tenant(name="a"), Tenant(name="b"), Tenant(name="heavy", weight=3.0)
LIMIT_S = 60.0


class Large:
    """Something that work reads."""


class Works:
    """Work that blocks its thread until it is released, and the order in which it began."""

    def __init__(self) -> None:
        self.threads = FairThreads(2, name="test")
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self._gates: dict[str, threading.Event] = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def ask(self, name: str, tenant: Tenant, num_chars: int) -> None:
        """Submit work of a tenant."""
        self._gates[name] = threading.Event()
        self.tasks[name] = asyncio.create_task(self.threads.run(self._work(name), tenant=tenant, num_chars=num_chars))

    def _work(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self._loop.call_soon_threadsafe(self._begin, name)
            assert self._gates[name].wait(LIMIT_S)
            return name

        return work

    def _begin(self, name: str) -> None:
        self.began.append(name)
        self._changed.set()

    async def until(self, num_begun: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.began) < num_begun:
                self._changed.clear()
                await self._changed.wait()

    async def end(self, name: str) -> None:
        self._gates[name].set()
        assert await self.tasks[name] == name

    def let_go(self) -> None:
        for gate in self._gates.values():
            gate.set()


@pytest_asyncio.fixture
async def works() -> AsyncIterator[Works]:
    works = Works()
    yield works
    works.let_go()
    await asyncio.gather(*works.tasks.values(), return_exceptions=True)
    works.threads.close()


async def test_short_text_is_tokenized_while_many_long_ones_wait(works: Works) -> None:
    for number in range(8):
        works.ask(f"long {number}", A, 4 << 20)
    await works.until(1)
    works.ask("hello", B, 5)
    await works.until(2)
    await works.end("hello")
    works.ask("hello again", A, 5)
    await works.until(3)
    assert works.began == ["long 0", "hello", "hello again"]


@pytest.mark.parametrize("num_chars", [5, LONG_CHARS + 1], ids=["short", "long"])
async def test_tenant_that_comes_last_does_not_wait_behind_all_of_another(works: Works, num_chars: int) -> None:
    num_at_once = 2 if num_chars == 5 else 1
    for number in range(6):
        works.ask(f"a{number}", A, num_chars)
    await works.until(num_at_once)
    works.ask("b", B, num_chars)
    await asyncio.sleep(0)
    for number in range(2):
        await works.end(f"a{number}")
        await works.until(num_at_once + number + 1)
    assert "b" in works.began[-2:], "and not behind a2 to a5"


async def test_tenants_that_keep_waiting_get_characters_by_weight(works: Works) -> None:
    for number in range(40):
        works.ask(f"a {number}", A, LONG_CHARS + 1)
        works.ask(f"heavy {number}", HEAVY, LONG_CHARS + 1)
    works.let_go()
    await works.until(40)
    served = Counter(name.split()[0] for name in works.began[:40])
    assert served["heavy"] == pytest.approx(30, abs=2)


async def test_calls_that_are_cancelled_hold_their_thread_and_start_nothing_more(works: Works) -> None:
    for number in range(6):
        works.ask(f"a{number}", A, LONG_CHARS + 1)
    await works.until(1)
    for task in works.tasks.values():
        task.cancel()
    await asyncio.gather(*works.tasks.values(), return_exceptions=True)
    works.ask("next", A, LONG_CHARS + 1)
    works.ask("hello", A, 5)
    await works.until(2)
    assert works.began == ["a0", "hello"]
    works.let_go()
    await works.until(3)
    assert works.began == ["a0", "hello", "next"]


async def test_work_that_fails_raises_and_frees_its_thread(works: Works) -> None:
    def fail() -> None:
        raise ValueError("bad text")

    for _ in range(5):
        with pytest.raises(ValueError, match="bad text"):
            await works.threads.run(fail, tenant=A, num_chars=LONG_CHARS + 1)
    works.ask("next", A, LONG_CHARS + 1)
    await works.until(1)


async def test_call_that_is_cancelled_in_the_turn_of_its_grant_frees_its_thread(works: Works) -> None:
    for number in range(5):
        works.ask(f"a{number}", A, LONG_CHARS + 1)
        await asyncio.sleep(0)
        works.tasks[f"a{number}"].cancel()
        await asyncio.gather(works.tasks[f"a{number}"], return_exceptions=True)
        works.let_go()
    works.ask("next", A, LONG_CHARS + 1)
    works.let_go()
    await works.tasks["next"]


@pytest.mark.usefixtures("no_collecting")
async def test_work_that_fails_keeps_nothing_that_it_has_read_alive() -> None:
    threads, read = FairThreads(2, name="test"), list[weakref.ref[Large]]()

    def fail() -> None:
        large = Large()
        read.append(weakref.ref(large))
        raise ValueError("large")

    try:
        for _ in range(8):
            with pytest.raises(ValueError, match="large"):
                await threads.run(fail, tenant=A, num_chars=1)
        assert sum(each() is not None for each in read) <= 2  # what a thread has done last
    finally:
        threads.close()
