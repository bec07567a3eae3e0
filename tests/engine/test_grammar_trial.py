"""Hostile grammars end, at worst, the process in which they are tried."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import InvalidRequest, Overloaded
from engine import grammar_trial
from engine.grammar_trial import GrammarTrial
from tests.builders import FAKE_GRAMMARS


@pytest.fixture(name="trial", scope="module")
def _trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(FAKE_GRAMMARS)
    yield trial
    trial.close()


DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": DEEP},
        {"json": {"type": "integer", "multipleOf": 99999989}},
        {"json": {"$ref": "#"}},
        {"regex": "[^\\s\\S]"},
        {"grammar": "start: start"},
    ],
    ids=["deep rules", "slow", "no schema", "no text", "no end"],
)
def test_hostile_grammar_is_refused(
    trial: GrammarTrial, structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "START_S", 120.0)
    monkeypatch.setattr(grammar_trial, "WALL_S", 120.0)
    monkeypatch.setattr(grammar_trial, "TRIAL_S", 0.5)
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        trial.pass_or_refuse(json.dumps(structure))
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        trial.pass_or_refuse(json.dumps(structure))
    monkeypatch.setattr(grammar_trial, "TRIAL_S", 60.0)
    trial.pass_or_refuse('{"choice": ["yes", "no"]}')


def test_grammar_on_a_host_that_is_too_busy_is_refused_for_now_only(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "START_S", 120.0)
    monkeypatch.setattr(grammar_trial, "WALL_S", 60.0)
    good = '{"choice": ["one", "two"]}'
    trial.pass_or_refuse('{"choice": ["yes", "no"]}')
    assert trial._process is not None  # noqa: SLF001
    trial._process.send_signal(signal.SIGSTOP)  # noqa: SLF001
    with monkeypatch.context() as busy:
        busy.setattr(grammar_trial, "WALL_S", 0.2)
        with pytest.raises(Overloaded):
            trial.pass_or_refuse(good)
    trial.pass_or_refuse(good)
