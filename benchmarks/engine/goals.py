"""The goals of the engine on a CPU, each met or missed in a run that measured its arms and its case."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from benchmarks.engine.arms import KVRELAY, LLAMA_CPP, VLLM_CPU
from benchmarks.engine.measure import RATES
from benchmarks.figures import Figures, spread

TOKENS_PER_S = "tokens per s"
OF_THE_FLOOR = "of the floor"
_INT8, _INT4, _INT8_KV = (f"{KVRELAY} {each}" for each in ("int8", "int4", "int8-kv"))
_PREFILLS = ("prefill 1x1024", "prefill 8x1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure of an arm that is to reach a value: a ratio to another arm, or a share of the floor."""

    arm: str
    case: str
    at_least: float
    base: str | None = None
    """Arm whose rate is 1; None: what the machine can do at best is."""


GOALS = (
    Goal(arm=_INT4, case="decode 1", at_least=1.3, base=f"{LLAMA_CPP} q4_0"),
    Goal(arm=_INT4, case="decode 1", at_least=2.0, base=KVRELAY),
    Goal(arm=_INT8, case="decode 1", at_least=1.5, base=KVRELAY),
    Goal(arm=_INT8, case="decode 8", at_least=1.1, base=KVRELAY),
    *(Goal(arm=arm, case=case, at_least=1.0, base=KVRELAY) for arm in (_INT8, _INT4) for case in _PREFILLS),
    Goal(arm=_INT8_KV, case="decode 1 at 8k", at_least=1.5, base=KVRELAY),
    Goal(arm=KVRELAY, case="decode 32", at_least=1.4, base=VLLM_CPU),
    Goal(arm=KVRELAY, case="mixed 16", at_least=1.3, base=VLLM_CPU),
    Goal(arm=KVRELAY, case="decode 1 at 8k", at_least=2.0, base=VLLM_CPU),
    *(Goal(arm=KVRELAY, case=case, at_least=0.9) for case in _PREFILLS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A goal and what each round reached."""

    goal: Goal
    rounds: list[float]

    @property
    def is_met(self) -> bool:
        """Whether the median of the rounds reaches the goal."""
        return statistics.median(self.rounds) >= self.goal.at_least


def judge(figures: Figures) -> Iterator[Judged]:
    """Yield the goals whose arms and case were measured."""
    for goal in GOALS:
        unit = OF_THE_FLOOR if goal.base is None else TOKENS_PER_S
        figure = figures.all.get((RATES, goal.case, goal.arm, unit))
        if figure is None:
            continue
        rounds = figure.rounds if goal.base is None else figures.ratios(figure, goal.base)
        if rounds:
            yield Judged(goal=goal, rounds=rounds)


def goals_table(judged: list[Judged]) -> Table:
    """Return a line for each goal."""
    table = Table("goal", "at least", "reached", "", title="goals", title_justify="left")
    for each in judged:
        goal = each.goal
        beside = "of the floor" if goal.base is None else f"/ {goal.base}"
        verdict = "met" if each.is_met else "missed"
        table.add_row(f"{goal.case}: {goal.arm} {beside}", f"{goal.at_least:g}", spread(each.rounds), verdict)
    return table
