"""Arms of `benchmarks.planner`: ways to size the pools, as its command line names them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.planner.baselines import Bounds, DynamoLoad, DynamoLoadSettings, QueueLength, QueueLengthSettings
from cluster.planner.plan import Planner, PlannerSettings, PoolSizes
from cluster.planner.slo_planner import SloPlanner
from common.slo import Slo

FIRST = PoolSizes(prefill=3, decode=1)
"""Initial sizes of all arms but fixed splits: enough for midnight."""
STARTUP_S = 120.0
_FLIP_S = 2.0
_DOWNSCALE_DELAY_S = 600.0
"""Default of Ray Serve."""
_BOUNDS = Bounds(max_workers=10)
"""Bounds of the other autoscalers, above the peak's need. Unbounded, Ray's rule starts dozens of workers."""


class ArmError(Exception):
    """An arm's text is invalid; the message says what is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to size the pools."""

    name: str
    kind: str
    first: PoolSizes = FIRST
    make_planner: Callable[[], Planner] | None = None
    """Makes the planner that changes the sizes; None: they stay."""
    startup_s: float = STARTUP_S
    flip_s: float | None = None

    @property
    def file_name(self) -> str:
        """The arm's name, fit for a file system."""
        return re.sub(r"[^\w.+=-]", "_", self.name)


def parse_arm(text: str, *, slo: Slo, interval_s: float) -> Arm:
    """Return the arm of a text. Raises ArmError."""
    base, *changes = text.split("+")
    arm = replace(_base(base, slo=slo, interval_s=interval_s), name=text)
    for change in changes:
        if change == "noflip":
            arm = replace(arm, flip_s=None)
        elif match := re.fullmatch(r"startup=(\d+(?:\.\d+)?)", change):
            arm = replace(arm, startup_s=float(match[1]))
        else:
            raise ArmError(f"{text}: {change!r} is not a change of an arm; say noflip or startup=SECONDS")
    return arm


def _base(text: str, *, slo: Slo, interval_s: float) -> Arm:
    if match := re.fullmatch(r"(\d+)P(\d+)D", text):
        return Arm(name=text, kind="fixed", first=PoolSizes(prefill=int(match[1]), decode=int(match[2])))
    kind, *values = text.split(":")
    if not all(re.fullmatch(r"\d+(\.\d+)?", value) for value in values):
        raise ArmError(f"{text!r}: numbers must follow the colons; say ray:2:16, dynamo:0.8 or ours:0.98")
    numbers = [float(value) for value in values]
    match kind, len(numbers):
        case "ray", 2 | 3:
            delay_s = numbers[2] if len(numbers) == 3 else _DOWNSCALE_DELAY_S
            prefill, decode = (
                QueueLengthSettings(target_ongoing_requests=target, downscale_delay_s=delay_s, bounds=_BOUNDS)
                for target in numbers[:2]
            )
            return Arm(name=text, kind="ray", make_planner=lambda: QueueLength(prefill, decode))
        case "dynamo", 1 | 2:
            ttft_s = numbers[1] if len(numbers) == 2 else slo.ttft_s
            load = DynamoLoadSettings(ttft_s=ttft_s, itl_s=slo.tpot_s, sensitivity=numbers[0], bounds=_BOUNDS)
            return Arm(name=text, kind="dynamo", make_planner=lambda: DynamoLoad(load))
        case "ours", 0 | 1:
            ours = PlannerSettings(slo=slo, interval_s=interval_s)
            if numbers:
                ours = replace(ours, attainment=numbers[0])
            return Arm(name=text, kind="ours", make_planner=lambda: SloPlanner(ours), flip_s=_FLIP_S)
    raise ArmError(
        f"{text!r} is not an arm; say 5P2D, ray:2:16, dynamo:0.8 or ours, with the suffixes +noflip or +startup=240"
    )
