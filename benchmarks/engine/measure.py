"""Runs the arms in turns and keeps every sample."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engine.cases import Case
from benchmarks.engine.floors import MachineRates, RateMeter
from benchmarks.peers.process import Arm
from benchmarks.peers.protocol import Output

Report = Callable[[str], None]

# Threads that wait for work spin for some milliseconds before they sleep (OpenMP): let the other arm's fall asleep.
_SETTLE_S = 0.3
_REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One arm's turn at one case."""

    arm: str
    case: str
    round_idx: int
    tokens_per_s: float
    """The case's rate."""
    ttft_s: float
    """Until every sequence has its first token."""
    total_s: float
    idle_cpu_s: float
    """CPU time that the waiting arms used meanwhile: near 0, or they disturb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two arms' greedy answers to the same prompts agree; they need not, where two logits nearly tie."""

    case: str
    round_idx: int
    arms: tuple[str, str]
    first_tokens: float
    """Share of answers that begin with the same token."""
    tokens: float
    """Share of tokens before the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRates:
    """Rates of the machine just before the arms took their turns."""

    case: str
    round_idx: int
    rates: MachineRates


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything of one run. The warm-up round is not in it."""

    samples: list[Sample]
    agreements: list[Agreement]
    rates: list[CaseRates]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases, arms and rounds to run."""

    cases: Sequence[Case]
    num_rounds: int
    """Measured ones, behind one that warms up."""
    vocab_size: int
    seed: int


def run(arms: Sequence[Arm], plan: Plan, report: Report) -> Measured:
    """Measure round by round: A B, then B A, and so on. One arm computes at a time. Raises ArmFailed."""
    rng = random.Random(plan.seed)
    meter = RateMeter()
    measured = Measured(samples=[], agreements=[], rates=[])
    for round_idx in range(plan.num_rounds + 1):
        samples: list[Sample] = []
        agreements: list[Agreement] = []
        rates: list[CaseRates] = []
        for case_idx, case in enumerate(plan.cases):
            turns = arms if (round_idx + case_idx) % 2 == 0 else arms[::-1]
            prompts = case.prompts(rng, plan.vocab_size)
            time.sleep(_SETTLE_S)
            rates.append(CaseRates(case=case.name, round_idx=round_idx, rates=meter.measure()))
            answers: dict[str, list[Output]] = {}
            for arm in turns:
                sample, answers[arm.name] = _take_turn(arm, arms, case, prompts, round_idx)
                samples.append(sample)
            agreements.extend(_agreements(answers, arms, case, round_idx))
            report(_progress(round_idx, plan, case, samples[-len(arms) :]))
        if round_idx:  # the first one compiled, allocated and filled caches
            measured.samples += samples
            measured.agreements += agreements
            measured.rates += rates
    return measured


def _take_turn(
    arm: Arm, arms: Sequence[Arm], case: Case, prompts: list[list[int]], round_idx: int
) -> tuple[Sample, list[Output]]:
    waiting = [other for other in arms if other is not arm]
    time.sleep(_SETTLE_S)
    before_s = sum(other.cpu_s() for other in waiting)
    outputs = arm.generate(prompts, case.output_tokens, timeout_s=_REQUEST_TIMEOUT_S)
    idle_cpu_s = sum(other.cpu_s() for other in waiting) - before_s
    sample = Sample(
        arm=arm.name,
        case=case.name,
        round_idx=round_idx,
        tokens_per_s=case.tokens_per_s(outputs),
        ttft_s=max(output.times_s[0] for output in outputs),
        total_s=max(output.times_s[-1] for output in outputs),
        idle_cpu_s=idle_cpu_s,
    )
    return sample, outputs


def _agreements(answers: dict[str, list[Output]], arms: Sequence[Arm], case: Case, round_idx: int) -> list[Agreement]:
    """Compare the first arm's answers with every other's."""
    ours = answers[arms[0].name]
    return [
        Agreement(
            case=case.name,
            round_idx=round_idx,
            arms=(arms[0].name, other.name),
            first_tokens=statistics.mean(
                a.token_ids[0] == b.token_ids[0] for a, b in zip(ours, answers[other.name], strict=True)
            ),
            tokens=statistics.mean(
                common_prefix(a.token_ids, b.token_ids) / len(a.token_ids)
                for a, b in zip(ours, answers[other.name], strict=True)
            ),
        )
        for other in arms[1:]
    ]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two answers share before they differ."""
    return next((idx for idx, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _progress(round_idx: int, plan: Plan, case: Case, samples: Sequence[Sample]) -> str:
    label = f"round {round_idx}/{plan.num_rounds}" if round_idx else "warm-up  "
    rates = "   ".join(
        f"{sample.arm} {sample.tokens_per_s:.0f} tokens/s" for sample in sorted(samples, key=lambda s: s.arm)
    )
    return f"{label}  {case.name:<15} {rates}"
