"""Which arms the plots of an experiment show as curves, and how.

A few arms have a colour each. When there are many, only the best split of each size and the best aggregated arm of
that size are shown, with a colour for each size. Marks of measured points are filled, those of simulated ones hollow;
lines of aggregated arms are dashed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from measure.experiment.analysis import ArmFinding, Findings
from measure.experiment.points import Arm, Source
from measure.pages.theme import PALETTE

MAX_ARMS = 8
"""Number of curves that can be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Look of an arm's curve."""

    finding: ArmFinding
    name: str
    color: str
    symbol: str
    dash: str


def shown_arms(findings: Sequence[Findings]) -> tuple[Shown, ...]:
    """Return the arms that are shown as curves, real ones first."""
    chosen = [(each, _chosen(each)) for each in findings]
    colors = _colors([arm for _, arms in chosen for arm in arms])
    has_both = len(findings) > 1
    return tuple(
        Shown(
            finding=arm,
            name=arm.arm.name + (", simulated" if has_both and each.source is Source.SIMULATED else ""),
            color=colors[arm.arm.name],
            symbol=_symbol(arm.arm, each.source),
            dash="solid" if arm.arm.num_prefill else "dash",
        )
        for each, arms in chosen
        for arm in arms
    )


def is_thinned(findings: Sequence[Findings]) -> bool:
    """Return whether some arms are left out of the curves."""
    return any(len(_chosen(each)) < len(each.arms) for each in findings)


def _chosen(findings: Findings) -> tuple[ArmFinding, ...]:
    if len(findings.arms) <= MAX_ARMS:
        return findings.arms
    names = {each.arm.name for each in findings.arms if each.arm.is_external}
    names |= {ranking.arms[0].arm.name for ranking in findings.rankings}
    names |= {payoff.whole.arm.name for payoff in findings.payoffs}
    return tuple(each for each in findings.arms if each.arm.name in names)


def _colors(arms: Sequence[ArmFinding]) -> Mapping[str, str]:
    """Return colours by name: one for each arm if there are few, else one for each size."""
    names = list(dict.fromkeys(each.arm.name for each in arms))
    if len(names) <= MAX_ARMS:
        return dict(zip(names, PALETTE, strict=False))
    sizes = sorted({each.arm.num_workers for each in arms})
    return {each.arm.name: PALETTE[sizes.index(each.arm.num_workers) % len(PALETTE)] for each in arms}


def _symbol(arm: Arm, source: Source) -> str:
    symbol = "diamond" if arm.is_external else "circle" if arm.num_prefill else "square"
    return symbol if source is Source.REAL else f"{symbol}-open"
