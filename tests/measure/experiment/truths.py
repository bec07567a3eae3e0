"""Points of arms of which one knows what they serve."""

from collections.abc import Sequence

from measure.experiment.points import Arm, KindPoint, Latency, Point, Source

LOADS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
NUM_REQUESTS = 2000


def make_arm(num_prefill: int, num_decode: int, **settings: str) -> Arm:
    name = f"{num_prefill}P{num_decode}D" if num_prefill else f"{num_decode} aggregated"
    return Arm(
        name=" ".join([name, *settings.values()]), num_prefill=num_prefill, num_decode=num_decode, settings=settings
    )


def make_kind(kind: str, num_requests: int, late: int = 0, slow: int = 0, *, ttft_s: float = 0.5) -> KindPoint:
    ttft = Latency(p50=ttft_s / 2, p90=ttft_s, p99=ttft_s)
    itl = Latency(p50=0.02, p90=0.02, p99=0.04)
    return KindPoint(
        kind=kind,
        num_requests=num_requests,
        num_good=num_requests - late - slow,
        num_refused=0,
        num_ttft_misses=late,
        num_itl_misses=slow,
        ttft=ttft,
        itl=itl,
        tpot=itl,
        e2e=ttft,
    )


def make_point(
    arm: Arm,
    load: float,
    *,
    late: float = 0.0,
    slow: float = 0.0,
    repeat: int = 0,
    source: Source = Source.SIMULATED,
    num_requests: int = NUM_REQUESTS,
) -> Point:
    """Return a point of which shares of the requests were late or slow."""
    kinds = ("all", "chats", "documents")
    return Point(
        arm=arm,
        source=source,
        load=load,
        repeat=repeat,
        duration_s=num_requests / load,
        kinds=tuple(
            make_kind(kind, num_requests, round(late * num_requests), round(slow * num_requests)) for kind in kinds
        ),
        output_tokens_per_s=100.0,
        token_hit=0.2,
        prefill_busy=min(1.0, load / 6) if arm.num_prefill else None,
        decode_busy=1.0,
        kv_peak=0.3,
        transfer_bytes=10**9 if arm.num_prefill else 0,
        transfer_exposed_p50_s=0.01 if arm.num_prefill else None,
    )


def served_up_to(capacity: float, arm: Arm, loads: Sequence[float] = LOADS, *, by: str = "late") -> list[Point]:
    """Return points of an arm that serves everything up to a load, and a third less beyond."""
    return [make_point(arm, load, **{by: 0.0 if load <= capacity else 0.33}) for load in loads]  # type: ignore[arg-type]
