"""Arms and points whose truth is known, and a bench without servers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from measure.experiment.arms import ArmPlan
from measure.experiment.points import Arm, Cell, Point, Source
from measure.experiment.runner import ArmFailed, Measure
from measure.figures import Figures, Percentiles

LOADS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
NUM_REQUESTS = 2000


def make_arm(num_prefill: int = 1, num_decode: int = 1, *, name: str = "", **settings: str) -> Arm:
    title = name or (f"{num_prefill}P{num_decode}D" if num_prefill else f"{num_decode} aggregated")
    return Arm(
        name=" ".join([title, *settings.values()]), num_prefill=num_prefill, num_decode=num_decode, settings=settings
    )


def make_point(
    arm: Arm | None = None,
    load: float = 1.0,
    *,
    late: float = 0.0,
    slow: float = 0.0,
    repeat: int = 0,
    source: Source = Source.SIMULATED,
    num_requests: int = NUM_REQUESTS,
) -> Point:
    """Return a point at which shares of the requests were late or slow, equal for both kinds."""
    arm = arm or make_arm()
    num_late, num_slow = round(late * num_requests), round(slow * num_requests)
    ttft, itl = Percentiles(p50=0.25, p90=0.5, p99=0.5), Percentiles(p50=0.02, p90=0.02, p99=0.04)
    figures = Figures(
        num_requests=num_requests,
        num_complete=num_requests,
        num_good=num_requests - num_late - num_slow,
        num_ttft_misses=num_late,
        num_tpot_misses=num_slow,
        ttft=ttft,
        itl=itl,
        tpot=itl,
        e2e=ttft,
    )
    return Point(
        arm=arm,
        source=source,
        load=load,
        repeat=repeat,
        duration_s=num_requests / load,
        kinds=dict.fromkeys(("all", "chats", "documents"), figures),
        output_tokens_per_s=100.0,
        token_hit=0.2,
        prefill_busy=min(1.0, load / 6) if arm.num_prefill else None,
        decode_busy=1.0,
        kv_peak=0.3,
        transfer_bytes=10**9 if arm.num_prefill else 0,
        transfer_exposed_p50_s=0.01 if arm.num_prefill else None,
    )


def served_up_to(capacity: float, arm: Arm, loads: Sequence[float] = LOADS, *, by: str = "late") -> list[Point]:
    """Return the points of an arm that serves all requests up to a load, and a third fewer beyond."""
    return [make_point(arm, load, **{by: 0.0 if load <= capacity else 0.33}) for load in loads]  # type: ignore[arg-type]


class FakeBench:
    """A bench that logs its calls and serves all requests up to 2/s; `before` may raise what a run may raise."""

    source = Source.REAL

    def __init__(self, *, before: Callable[[Cell], None] | None = None, broken: tuple[str, ...] = ()) -> None:
        self.log: list[str] = []
        self._before = before
        self._broken = broken

    @contextmanager
    def serve(self, plan: ArmPlan) -> Iterator[Measure]:
        """Start and stop nothing."""
        if plan.arm.name in self._broken:
            raise ArmFailed("no such hardware")
        self.log.append(f"up {plan.arm.name}")
        try:
            yield self._measure
        finally:
            self.log.append(f"down {plan.arm.name}")

    def seconds(self, num_cells: int, num_starts: int) -> float:
        """Return a second for each."""
        return num_cells + num_starts

    def _measure(self, cell: Cell, folder: Path) -> Point:
        self.log.append(cell.name)
        (folder / "requests.jsonl").write_text("{}\n", encoding="utf-8")
        if self._before is not None:
            self._before(cell)
        late = 0.0 if cell.load <= 2 else 0.5
        arm = make_arm(name=cell.arm)
        return make_point(arm, cell.load, late=late, repeat=cell.repeat, source=Source.REAL, num_requests=100)


def make_plan(name: str) -> ArmPlan:
    """Return the plan of an arm that is served elsewhere."""
    return ArmPlan(arm=make_arm(name=name), serving=None, url="127.0.0.1:1")
