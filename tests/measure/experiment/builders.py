"""Points and arms with what a test cares about."""

from measure.experiment.points import Arm, KindPoint, Latency, Point, Source


def make_arm(name: str = "1P1D", *, num_prefill: int = 1, num_decode: int = 1) -> Arm:
    """Return an arm."""
    return Arm(name=name, num_prefill=num_prefill, num_decode=num_decode)


def make_point(
    *, arm: Arm | None = None, load: float = 1.0, repeat: int = 0, num_requests: int = 100, num_good: int = 100
) -> Point:
    """Return the point of ten seconds, in which all sessions were chats."""
    everybody, chats = (_kind(kind, num_requests=num_requests, num_good=num_good) for kind in ("all", "chats"))
    return Point(
        arm=arm or make_arm(),
        source=Source.REAL,
        load=load,
        repeat=repeat,
        duration_s=10.0,
        kinds=(everybody, chats),
        output_tokens_per_s=100.0,
        token_hit=None,
        prefill_busy=0.5,
        decode_busy=0.25,
        kv_peak=0.1,
        transfer_bytes=1000,
        transfer_exposed_p50_s=0.001,
    )


def _kind(kind: str, *, num_requests: int, num_good: int) -> KindPoint:
    latency = Latency(p50=0.1, p90=0.2, p99=0.3)
    return KindPoint(
        kind=kind,
        num_requests=num_requests,
        num_good=num_good,
        num_refused=0,
        num_ttft_misses=num_requests - num_good,
        num_itl_misses=0,
        ttft=latency,
        itl=latency,
        tpot=latency,
        e2e=latency,
    )
