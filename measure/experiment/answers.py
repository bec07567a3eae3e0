"""Findings in plain words, each with its numbers."""

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

from measure.experiment.analysis import ArmFinding, Balance, Findings, Limit, Ranking
from measure.experiment.curves import Reading
from measure.experiment.payoff import KNEE_SHARE, ArmReach, Payoff, Verdict, reach_text
from measure.experiment.points import Source
from measure.figures import ALL
from measure.load.estimates import Estimate
from measure.pages.wording import change, count, duration, listed, number, percent, rate

Answer = tuple[str, str]
"""A question and its answer."""


def answers_of(findings: Findings) -> tuple[Answer, ...]:
    """Return answers to questions of capacity planning, the most important first."""
    found = itertools.chain(
        _does_it_pay(findings),
        _which_ratio(findings),
        _next_worker(findings),
        _what_limits(findings),
        _trade(findings),
        _growth(findings),
        _externals(findings),
    )
    return tuple(found)


# ── whether it pays ─────────────────────────────────────────────────────────────────────────────────────────────────


def _does_it_pay(findings: Findings) -> Iterator[Answer]:
    question = "Does disaggregation pay?"
    payoffs = findings.payoffs
    if not payoffs:
        yield question, "Cannot tell: no split and aggregated arms of equal resources were measured."
        return
    if len(payoffs) <= 3:
        for payoff in payoffs:
            yield question, _paying(payoff, findings)
    else:
        yield question, _paying_by_size(payoffs, findings)
    for payoff in payoffs[-2:]:
        for before, after in payoff.flips:
            better, worse = _by_verdict(payoff, after.verdict)
            yield (
                "Where is the line?",
                f"With {count(payoff.num_workers, 'worker')}, {worse} is ahead at {number(before.load)}/s"
                f" (by {rate(abs(before.difference.value))}) and {better} at {number(after.load)}/s"
                f" (by {rate(abs(after.difference.value))}): the line is between these loads.",
            )


def _paying(payoff: Payoff, findings: Findings) -> str:
    split, whole = payoff.split.arm.name, payoff.whole.arm.name
    reaches = f"{split} serves {reach_text(payoff.split.reach)}, {whole} {reach_text(payoff.whole.reach)}"
    bound = f"with {percent(findings.share, 0)} good requests"
    match payoff.verdict:
        case Verdict.MORE:
            text = f"Yes, with {count(payoff.num_workers, 'worker')}: {bound}, {reaches}"
        case Verdict.LESS:
            text = f"No, with {count(payoff.num_workers, 'worker')} it loses: {bound}, {reaches}"
        case Verdict.UNCLEAR:
            text = f"Cannot tell with {count(payoff.num_workers, 'worker')}: {bound}, {reaches}"
    if payoff.ratio is not None:
        value, low, high = (change(each) for each in (payoff.ratio.value, payoff.ratio.low, payoff.ratio.high))
        text += f"; that is {value} (95 %: {low} to {high})"
    return f"{text}. {_told_by_goodput(payoff)}".rstrip()


def _told_by_goodput(payoff: Payoff) -> str:
    """Return the goodput of both at the load where they differ most, of the loads with a clear verdict."""
    decided = [each for each in payoff.loads if each.verdict is not Verdict.UNCLEAR]
    if not decided:
        return "Their goodput cannot be told apart at any load." if payoff.loads else ""
    most = max(decided, key=lambda each: abs(each.difference.value))
    ours, theirs = (_at(arm, most.load).goodput.value for arm in (payoff.split, payoff.whole))
    low, high = sorted((most.difference.low, most.difference.high))
    return (
        f"At {rate(most.load)} {payoff.split.arm.name} answers {rate(ours)} well and {payoff.whole.arm.name}"
        f" {rate(theirs)} (difference {number(most.difference.value)}, 95 %: {number(low)} to {number(high)})."
    )


def _paying_by_size(payoffs: Sequence[Payoff], findings: Findings) -> str:
    parts = []
    for verdict, verb in ((Verdict.MORE, "it pays"), (Verdict.LESS, "it loses"), (Verdict.UNCLEAR, "one cannot tell")):
        group = [each for each in payoffs if each.verdict is verdict]
        if group:
            sizes = [
                f"{each.num_workers} ({change(each.ratio.value)})" if each.ratio else str(each.num_workers)
                for each in group
            ]
            parts.append(f"with {listed(sizes)} workers {verb}")
    text = "; ".join(parts)
    return (
        f"{text[0].upper()}{text[1:]}. The best split of each size is compared with as many aggregated workers, by the"
        f" load that each serves with {percent(findings.share, 0)} good requests."
    )


def _by_verdict(payoff: Payoff, verdict: Verdict) -> tuple[str, str]:
    """Return the names of the better and the worse arm."""
    names = payoff.split.arm.name, payoff.whole.arm.name
    return names if verdict is Verdict.MORE else (names[1], names[0])


# ── which ratio, and what next ──────────────────────────────────────────────────────────────────────────────────────


def _which_ratio(findings: Findings) -> Iterator[Answer]:
    question = "Which ratio is best?"
    contests = [ranking for ranking in findings.rankings if len(ranking.arms) > 1 and ranking.arms[0].reach.load > 0]
    if not contests and findings.balance is None:
        yield question, "Cannot tell: no two splits of equal size were measured."
        return
    for ranking in contests[-2:]:
        yield question, _ranked(ranking)
    if findings.balance is not None:
        yield question, _balanced(findings.balance, findings.rankings)


def _ranked(ranking: Ranking) -> str:
    best, second = ranking.arms[:2]
    gap = f"{best.arm.name} serves {reach_text(best.reach)}, {second.arm.name} {reach_text(second.reach)}"
    if ranking.verdict is Verdict.MORE:
        return f"Of {count(ranking.num_workers, 'worker')}, {best.arm.name}: {gap}."
    return f"Of {count(ranking.num_workers, 'worker')}, {best.arm.name} or {second.arm.name}, one cannot tell: {gap}."


def _balanced(balance: Balance, rankings: Sequence[Ranking]) -> str:
    num_workers = max(ranking.num_workers for ranking in rankings)
    num_prefill, num_decode = balance.split(num_workers)
    return (
        f"Where its pool gave way first, a prefill worker carried {_ranged(balance.per_prefill)} requests/s and a"
        f" decode worker {_ranged(balance.per_decode)}: both give way at once with"
        f" {percent(balance.prefill_share, 0)} of the workers on prefill, which is {num_prefill}P{num_decode}D of"
        f" {num_workers}."
    )


def _ranged(estimate: Estimate) -> str:
    """Return a value with its range, if that is not empty."""
    if number(estimate.low) == number(estimate.high):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def _next_worker(findings: Findings) -> Iterator[Answer]:
    question = "What should the next worker be?"
    told = [each for each in (ranking.arms[0] for ranking in findings.rankings) if each.next_worker is not None]
    for arm in told[-3:]:
        following = arm.next_worker
        assert following is not None
        if not following.pool:
            text = f"Beside {arm.arm.name}, one cannot tell: {following.why}."
        elif following.is_measured:
            text = f"Beside {arm.arm.name}, a {following.pool} worker: {following.why}."
        else:
            text = f"Beside {arm.arm.name}, probably a {following.pool} worker: {following.why}."
        yield question, text
    if not told:
        yield question, "Cannot tell: nothing limited the best splits at the loads that were measured."


# ── what limits ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _what_limits(findings: Findings) -> Iterator[Answer]:
    if len(findings.arms) <= 4:
        for arm in findings.arms:
            yield "What gives way first?", _limited(arm)
        return
    groups: dict[Limit, list[str]] = {}
    for arm in findings.arms:
        groups.setdefault(arm.limit.limit, []).append(arm.arm.name)
    parts = [f"{limit.value}: {listed(names)}" for limit, names in groups.items()]
    yield "What gives way first?", "; ".join(parts) + "."


def _limited(arm: ArmFinding) -> str:
    name, limit = arm.arm.name, arm.limit
    if limit.limit is Limit.NOTHING:
        text = f"{name}: nothing up to {number(limit.load)}/s, where {limit.why}"
    else:
        text = f"{name}: the {limit.limit}; at {number(limit.load)}/s {limit.why}"
    if arm.knee is not None:
        text += f". From {number(arm.knee)}/s on less than {percent(KNEE_SHARE, 0)} of the load is served well"
    return text + "."


# ── what one pays for the other ─────────────────────────────────────────────────────────────────────────────────────


def _trade(findings: Findings) -> Iterator[Answer]:
    if not findings.payoffs:
        return
    payoff = max(findings.payoffs, key=lambda each: (bool(each.loads), each.num_workers))
    load = _telling_load(payoff)
    if load is None:
        return
    parts = []
    for kind in _kinds(payoff.split, load):
        pairs = [
            f"{name} {duration(ours.value)} against {duration(theirs.value)}"
            for name, pick in (("first token", attrgetter("ttft")), ("gap between tokens", attrgetter("itl")))
            if (ours := _at(payoff.split, load).p99(kind, pick)) is not None
            and (theirs := _at(payoff.whole, load).p99(kind, pick)) is not None
        ]
        if pairs:
            parts.append(f"{'all requests' if kind == ALL else kind}: {', '.join(pairs)}")
    if parts:
        names = f"{payoff.split.arm.name} against {payoff.whole.arm.name}"
        yield "What does one pay for the other?", f"99th percentiles of {names} at {rate(load)}. {'; '.join(parts)}."


def _telling_load(payoff: Payoff) -> float | None:
    """Return the highest common load at which one of them still serves most requests well; else the lowest one."""
    loads = [each.load for each in payoff.loads]
    served = [
        load
        for load in loads
        if max(_at(arm, load).good_share.value for arm in (payoff.split, payoff.whole)) >= KNEE_SHARE
    ]
    return max(served) if served else min(loads, default=None)


def _at(arm: ArmReach, load: float) -> Reading:
    reading = arm.curve.at(load)
    assert reading is not None, "both were measured at this load"
    return reading


def _kinds(arm: ArmReach, load: float) -> tuple[str, ...]:
    kinds = _at(arm, load).kinds
    return kinds[1:] or kinds


# ── size, and others ────────────────────────────────────────────────────────────────────────────────────────────────


def _growth(findings: Findings) -> Iterator[Answer]:
    best = [ranking.arms[0] for ranking in findings.rankings if ranking.arms[0].reach.is_bracketed]
    if len(best) < 3:
        return
    small, large = best[0], best[-1]
    yield (
        "Does it grow?",
        f"{large.arm.name} serves {number(large.reach.load / small.reach.load)} times what {small.arm.name} does, with"
        f" {number(large.arm.num_workers / small.arm.num_workers)} times the workers: {rate(large.reach.per_unit)}"
        f" for each {findings.unit} in place of {rate(small.reach.per_unit)}.",
    )


def _externals(findings: Findings) -> Iterator[Answer]:
    ours = [each for each in findings.arms if not each.arm.is_external]
    for other in findings.arms:
        if not other.arm.is_external or not ours:
            continue
        best = max(ours, key=lambda each: each.reach.load)
        yield (
            f"And {other.arm.name}?",
            f"It serves {reach_text(other.reach)}; {best.arm.name} serves {reach_text(best.reach)}.",
        )


def agreement(findings: Sequence[Findings]) -> Iterator[Answer]:
    """Yield a comparison of simulated points with real ones of the same arms and loads."""
    by_source = {each.source: each for each in findings}
    if set(by_source) != set(Source):
        return
    real, simulated = by_source[Source.REAL], by_source[Source.SIMULATED]
    pairs = [
        (reading.goodput.value, other.goodput.value)
        for arm in real.arms
        if (twin := simulated.of(arm.arm.name)) is not None
        for reading in arm.curve.readings
        if (other := twin.curve.at(reading.load)) is not None
    ]
    if pairs:
        errors = sorted(abs(theirs - ours) / ours for ours, theirs in pairs if ours)
        yield (
            "Is the simulator right?",
            f"At {len(pairs)} loads that were measured and simulated, its goodput is off by"
            f" {percent(errors[len(errors) // 2], 0)} in the median, by {percent(errors[-1], 0)} at most.",
        )
