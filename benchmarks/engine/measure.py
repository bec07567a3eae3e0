"""Runs the arms in turns and keeps the figures of every round."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engine.arms import KVRELAY
from benchmarks.engine.cases import Case, best_tokens_per_s
from benchmarks.figures import Figures, in_turn
from benchmarks.peers.process import Arm, ArmFailed
from benchmarks.peers.protocol import Output
from engine.model.floors import RateMeter
from engine.work import ModelShape

Report = Callable[[str], None]

RATES, MACHINE, TURNS = "rates", "machine", "turns"
"""Parts of the figures: the arms' rates, what the machine does at best, and how long turns took."""

# Threads that wait for work spin for some milliseconds before they sleep (OpenMP): let the other arm's fall asleep.
_SETTLE_S = 0.3
_REQUEST_TIMEOUT_S = 600.0
_SPINS_CPU_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases and rounds to run."""

    cases: Sequence[Case]
    num_rounds: int
    """Measured ones, behind one that warms up."""
    vocab_size: int
    seed: int
    model: ModelShape


def run(arms: Sequence[Arm], plan: Plan, report: Report) -> Figures:
    """Measure round by round: A B, then B A, and so on. One arm computes at a time. Raises ArmFailed for one of ours.

    Another one that fails is left out, with its reason. The warm-up round is not in the figures.
    """
    rng, meter, figures, arms = random.Random(plan.seed), RateMeter(), Figures(), list(arms)
    for round_idx in range(plan.num_rounds + 1):
        label = f"round {round_idx}/{plan.num_rounds}" if round_idx else "warm-up  "
        for case_idx, case in enumerate(plan.cases):
            found = _measure_case(arms, case, plan, meter, rng, turn=round_idx + case_idx)
            for name, reason in found.missing.items():
                report(f"{name} is left out from here on: {reason}")
                figures.leave_out(name, reason)
                arms = [arm for arm in arms if arm.name != name]
            rates = {key[2]: figure.median for key, figure in found.all.items() if key[3] == "tokens per s"}
            report(f"{label}  {case.name:<15} " + "   ".join(f"{arm} {rates[arm]:.0f}" for arm in sorted(rates)))
            if round_idx:  # the first one compiled, allocated and filled caches
                figures.extend(found)
    return figures


def _measure_case(
    arms: Sequence[Arm], case: Case, plan: Plan, meter: RateMeter, rng: random.Random, *, turn: int
) -> Figures:
    """Return the figures of one round of a case. Each arm is held against what the machine could do just before."""
    figures, prompts = Figures(), case.prompts(rng, plan.vocab_size)
    time.sleep(_SETTLE_S)
    rates = meter.measure()
    best = best_tokens_per_s(case, plan.model, rates)
    answers: dict[str, list[Output]] = {}
    for arm in in_turn(arms, turn):
        waiting = [other for other in arms if other is not arm]
        time.sleep(_SETTLE_S)
        before_s = sum(other.cpu_s() for other in waiting)
        try:
            outputs = answers[arm.name] = arm.generate(prompts, case.output_tokens, timeout_s=_REQUEST_TIMEOUT_S)
        except ArmFailed as error:
            if arm.name.startswith(KVRELAY):
                raise
            figures.missing[arm.name] = str(error)
            arms = [other for other in arms if other is not arm]
            continue
        waiting_cpu_s = sum(other.cpu_s() for other in waiting) - before_s
        rate, ttft_s = case.tokens_per_s(outputs), max(output.times_s[0] for output in outputs)
        figures.add(RATES, case.name, arm.name, tokens_per_s=rate, of_the_floor=rate / best, TTFT_s=ttft_s)
        total_s = max(output.times_s[-1] for output in outputs)
        figures.add(TURNS, case.name, arm.name, total_s=total_s, CPU_s_of_waiting_arms=waiting_cpu_s)
    for other in arms[1:]:
        figures.add(RATES, case.name, other.name, **_agreement(answers[arms[0].name], answers[other.name]))
    figures.add(
        MACHINE,
        case.name,
        "at best",
        GB_read_per_s=rates.read_bytes_per_s / 1e9,
        TFLOP_per_s=rates.flops_per_s / 1e12,
        tokens_per_s_at_most=best,
    )
    return figures


def _agreement(ours: Sequence[Output], theirs: Sequence[Output]) -> Mapping[str, float]:
    """Return how far two arms' greedy answers to the same prompts agree; they need not, where two logits nearly tie.

    These are the shares of answers that begin with the same token, and of tokens before the first difference.
    """
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "same_first_tokens": statistics.mean(a.token_ids[0] == b.token_ids[0] for a, b in pairs),
        "same_tokens": statistics.mean(common_prefix(a.token_ids, b.token_ids) / len(a.token_ids) for a, b in pairs),
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two answers share before they differ."""
    return next((idx for idx, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def spinning_arms(figures: Figures) -> list[str]:
    """Return a sentence for every arm during whose turns the others did not rest."""
    spent_s: dict[str, dict[str, float]] = {}
    for (part, _case, arm, unit), figure in figures.all.items():
        if part == TURNS:
            units = spent_s.setdefault(arm, {})
            units[unit] = units.get(unit, 0.0) + sum(figure.rounds)
    shares = {arm: units["CPU s of waiting arms"] / units["total s"] for arm, units in sorted(spent_s.items())}
    return [
        f"while {arm} computed, the waiting arm used {share:.0%} of a core: the run is disturbed"
        for arm, share in shares.items()
        if share > _SPINS_CPU_SHARE
    ]
