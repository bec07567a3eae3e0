"""Every target by its name."""

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets.events import WatchTarget
from tests.fuzz.targets.http_door import HttpTarget
from tests.fuzz.targets.pull_client import PullTarget
from tests.fuzz.targets.router import AdminTarget, RouterTarget
from tests.fuzz.targets.trust import TrustTarget
from tests.fuzz.targets.worker import WorkerTarget

_ALL: tuple[type[Target], ...] = (
    RouterTarget,
    AdminTarget,
    WorkerTarget,
    WatchTarget,
    PullTarget,
    HttpTarget,
    TrustTarget,
)
TARGETS: Mapping[str, type[Target]] = {target.name: target for target in _ALL}
