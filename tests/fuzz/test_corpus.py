"""Every kept input, every input that once found something, and some by chance: nothing is wrong with any."""

import random
from collections.abc import Iterator

import pytest

from tests.fuzz.child import mutate
from tests.fuzz.kept import CORPUS, REGRESSIONS, read_inputs, read_kept
from tests.fuzz.runner import MAX_LOOP_S, Finding, Runner
from tests.fuzz.targets.catalog import TARGETS

_NUM_BY_CHANCE = 80
"""Inputs per target: a count, not a time, so that every machine runs the same ones."""
_MAX_BYTES = 300_000


@pytest.fixture(params=TARGETS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(TARGETS[request.param](), max_loop_s=MAX_LOOP_S).running() as running:
        yield running


def found_in(runner: Runner, data: bytes) -> list[Finding]:
    """Return what is wrong with an input again and again: a busy machine is slow once."""
    return runner.try_again(data) if runner.try_input(data) else []


def test_kept_inputs_and_regressions_are_served(runner: Runner) -> None:
    name = runner.target.name
    for data in (*runner.target.seeds(), *read_inputs([REGRESSIONS / name]), *read_kept(name)):
        assert found_in(runner, data) == [], data.hex()


def test_inputs_by_chance_are_served(runner: Runner) -> None:
    draw = random.Random(1)
    inputs = read_kept(runner.target.name)
    for _ in range(_NUM_BY_CHANCE):
        data = mutate(draw, inputs)
        assert found_in(runner, data) == [], data.hex()


def test_the_inputs_that_are_kept_are_small() -> None:
    files = [path for root in (CORPUS, REGRESSIONS) for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= _MAX_BYTES
