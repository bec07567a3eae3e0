"""Hostile grammars end, at worst, the process in which they are tried."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from common.errors import Overloaded
from engine.text import grammar_trial
from engine.text.grammar_trial import GrammarTrials
from tests.builders import FAKE_GRAMMARS

TIMEOUT_S = 60.0
GOOD = '{"choice": ["yes", "no"]}'
SLOW = '{"json": {"type": "integer", "multipleOf": 99999989}}'
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'


@pytest.fixture(name="trials")
async def _trials(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarTrials]:
    """Give trials all the time that a busy machine needs."""
    for name in ("START_S", "WALL_S", "TRIAL_S"):
        monkeypatch.setattr(grammar_trial, name, 120.0)
    trials = GrammarTrials(FAKE_GRAMMARS)
    yield trials
    await trials.aclose()


class Spent:
    """Takes the CPU seconds of one trial."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._is_known = asyncio.Event()

    def __call__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s
        self._is_known.set()

    async def known(self) -> float:
        """Return the CPU seconds when the trial has ended."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._is_known.wait()
        return self.cpu_s


def process_of(trials: GrammarTrials) -> psutil.Process:
    """Return the process that forks, a child of this one."""
    assert trials._forker is not None  # noqa: SLF001
    return psutil.Process(trials._forker.result()._process.pid)  # noqa: SLF001


HOSTILE: dict[str, dict[str, Any]] = {
    "deep rules": {"grammar": DEEP},
    "slow": json.loads(SLOW),
    "no schema": {"json": {"$ref": "#"}},
    "no text": {"regex": "[^\\s\\S]"},
    "no end": {"grammar": "start: start"},
}


async def test_hostile_grammars_are_refused(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, structure in HOSTILE.items():
        monkeypatch.setattr(grammar_trial, "TRIAL_S", 0.5)
        spent = Spent()
        verdict = await trials.run(json.dumps(structure), spent)
        assert "cannot be compiled" in verdict.reason, name
        assert ("it crashes the compiler (signal 11)" in verdict.reason) == (name == "deep rules")
        assert spent.cpu_s > 0
        monkeypatch.setattr(grammar_trial, "TRIAL_S", 60.0)
        assert not (await trials.run(GOOD, Spent())).reason


async def test_grammar_on_a_host_that_is_too_busy_is_refused_for_now_only(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trials.run(GOOD, Spent())
    process_of(trials).send_signal(signal.SIGSTOP)
    with monkeypatch.context() as busy:
        busy.setattr(grammar_trial, "WALL_S", 0.1)
        with pytest.raises(Overloaded):
            await trials.run(GOOD, Spent())
    assert not (await trials.run(GOOD, Spent())).reason


async def test_grammar_is_refused_for_now_only_when_the_host_runs_out_of_memory(trials: GrammarTrials) -> None:
    running = asyncio.create_task(trials.run(SLOW, Spent()))
    await trials.run(GOOD, Spent())
    (fork,) = process_of(trials).children()
    fork.kill()
    with pytest.raises(Overloaded):
        await running


async def test_trial_of_a_client_that_has_left_ends_and_its_cpu_time_is_known(trials: GrammarTrials) -> None:
    await trials.run(GOOD, Spent())
    spent = Spent()
    leaving = asyncio.create_task(trials.run(SLOW, spent))
    await trials.run(GOOD, Spent())  # the other one has begun by then
    leaving.cancel()
    assert await spent.known() < TIMEOUT_S
    assert process_of(trials).children() == []


async def test_trials_end_with_the_process_that_forked_them(trials: GrammarTrials) -> None:
    running = asyncio.create_task(trials.run(SLOW, Spent()))
    await trials.run(GOOD, Spent())
    process = process_of(trials)
    forks = process.children()
    assert len(forks) == 1
    process.kill()
    with pytest.raises(Overloaded):
        await running
    _gone, alive = await asyncio.to_thread(psutil.wait_procs, forks, timeout=TIMEOUT_S)
    assert not alive
    assert not (await trials.run(GOOD, Spent())).reason
