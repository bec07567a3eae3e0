"""Explains a plan to people, in words and numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.planner.evidence import Capacities
from cluster.planner.forecast import RateTrend
from cluster.planner.patience import PoolNeed
from cluster.planner.plan import Observation, PlannerSettings, Pool, PoolSizes, ScalingPlan
from cluster.planner.prefill_capacity import PrefillCapacity

_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers from which a plan follows."""

    observed: Observation
    present: PoolSizes
    capacities: Capacities
    trend: RateTrend
    rates: Mapping[Pool, float]
    """Requests a second that each pool is planned for."""
    needs: Mapping[Pool, PoolNeed]
    corrections: Mapping[Pool, float]


def hold(sizes: PoolSizes, why: str) -> ScalingPlan:
    """Return a plan that changes nothing without evidence."""
    return ScalingPlan(sizes=sizes, reason=f"nothing changes: {why}")


def explain(wanted: PoolSizes, numbers: Numbers, *, settings: PlannerSettings) -> ScalingPlan:
    """Return the plan with its reason and terms."""
    prefill, decode = numbers.capacities.prefill, numbers.capacities.decode
    present, trend, needs = numbers.present, numbers.trend, numbers.needs
    busy = prefill.utilization(present.prefill, trend.rate)
    tpot_s = decode.high_tpot_s(present.decode, trend.rate)
    parts = [
        _load(numbers),
        f"prefill needs {needs[Pool.PREFILL].to_grow} (has {present.prefill}, {busy:.0%} busy), "
        f"decode needs {needs[Pool.DECODE].to_grow} (has {present.decode},"
        f" gaps of {tpot_s * 1e3:.0f} ms of {settings.slo.tpot_s * 1e3:.0f})",
    ]
    if prefill.reachable < 1.0:
        parts.append(f"{1.0 - prefill.reachable:.0%} of the prompts are too long for their objective on any worker")
    if not decode.is_reachable:
        parts.append("no decode worker is fast enough for the gap between tokens, even alone")
    for pool, capacity in ((Pool.PREFILL, prefill), (Pool.DECODE, decode)):
        largest = settings.limits(pool).largest
        if not capacity.holds(largest, numbers.rates[pool]):
            parts.append(f"{pool} would need more than the {largest} workers that are allowed")
    tier_parts, tier_terms = _tiers(prefill)
    parts += tier_parts
    parts.append(_change(wanted, numbers, settings))
    terms = (
        ("requests_per_s", trend.rate),
        ("trend_per_min", trend.slope * _PER_MINUTE),
        *((f"{pool}_planned_per_s", numbers.rates[pool]) for pool in Pool),
        ("prefill_s_per_request", prefill.mean_work_s),
        ("prefill_utilization", busy),
        ("prefill_attainment", prefill.attainment(present.prefill, trend.rate)),
        *tier_terms,
        *_needs(numbers, Pool.PREFILL),
        ("decode_sequences", decode.num_sequences(present.decode, trend.rate)),
        ("decode_tpot_s", tpot_s),
        ("decode_kv_share", decode.kv_share(present.decode, trend.rate)),
        *_needs(numbers, Pool.DECODE),
        *((f"{pool}_startup_s", numbers.observed.startup_s.get(pool, 0.0)) for pool in Pool),
    )
    return ScalingPlan(sizes=wanted, reason="; ".join(parts), terms=terms)


def _tiers(prefill: PrefillCapacity) -> tuple[list[str], list[tuple[str, float]]]:
    """Return what tiers spare, and what larger ones would, as sentences and numbers."""
    tiers = prefill.tiers
    if not tiers.token_bytes:
        return [], []
    now, endless = prefill.tier_savings()
    parts, terms = list[str](), list[tuple[str, float]]()
    if tiers.max_blocks:
        terms += [("tier_fill", tiers.num_blocks / tiers.max_blocks)]
    if now.num_tokens:
        parts.append(f"tiers spare a request {now.prefill_s:.3g} s of prefill for {now.read_s:.3g} s of reading")
        terms += [("tier_spared_prefill_s", now.prefill_s), ("tier_read_s", now.read_s)]
    if endless.num_tokens:
        which = "larger tiers" if tiers.max_blocks else "tiers (tiers.disk_gib, tiers.host_gib)"
        spared = f"{endless.prefill_s:.3g} s of prefill for {endless.read_s:.3g} s of reading"
        guess = "" if tiers.is_measured else ", at a guessed 1 GB/s: kvrelay doctor measures the disk"
        parts.append(f"{which} would spare up to {spared}, since what was cached is computed again{guess}")
        terms += [("endless_tier_spared_prefill_s", endless.prefill_s), ("endless_tier_read_s", endless.read_s)]
    return parts, terms


def _needs(numbers: Numbers, pool: Pool) -> tuple[tuple[str, float], ...]:
    need = numbers.needs[pool]
    return (
        (f"{pool}_need", float(need.to_grow)),
        (f"{pool}_need_to_shrink", float(need.to_shrink)),
        (f"{pool}_correction", numbers.corrections[pool]),
    )


def _load(numbers: Numbers) -> str:
    trend, expected = numbers.trend, max(numbers.rates.values())
    text = f"{trend.rate:.2f} requests/s come"
    if trend.slope > 0.0:
        text += f", {trend.slope * _PER_MINUTE:.2f} more each minute"
    if numbers.observed.demand.num_queued:
        text += f", {numbers.observed.demand.num_queued} wait"
    if expected > trend.rate * 1.01:
        text += f", so {expected:.2f} are planned for"
    return text


def _change(wanted: PoolSizes, numbers: Numbers, settings: PlannerSettings) -> str:
    """Return the change, or the reason for its delay."""
    present = numbers.present
    sizes = {Pool.PREFILL: (present.prefill, wanted.prefill), Pool.DECODE: (present.decode, wanted.decode)}
    if wanted != present:
        changed = [f"{pool} {old} -> {new}" for pool, (old, new) in sizes.items() if old != new]
        text = " and ".join(changed)
        if all(old != new for old, new in sizes.values()) and (wanted.prefill > present.prefill) is not (
            wanted.decode > present.decode
        ):
            text += " (a worker changes its role)"
        short = [pool for pool, (_old, new) in sizes.items() if new < numbers.needs[pool].to_grow]
        return text + (f"; for now that is less than {' and '.join(short)} needs" if short else "")
    held = [pool for pool, (old, _new) in sizes.items() if numbers.needs[pool].to_shrink < old]
    short = [pool for pool, (old, _new) in sizes.items() if numbers.needs[pool].to_grow > old]
    if short and present.prefill + present.decode >= settings.max_workers:
        return f"nothing changes: all {settings.max_workers} workers that are allowed run"
    if short:
        return f"nothing changes yet: the next plan has to agree before {' and '.join(short)} may grow"
    if held:
        return f"nothing changes yet: less must have been enough for longer before {' and '.join(held)} may shrink"
    return "nothing changes"
