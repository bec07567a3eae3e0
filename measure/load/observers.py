"""Several observers as one."""

from measure.load.records import PoolSample, RequestRecord
from measure.load.spec import Observer, RunStart


class Observers:
    """Tells everything to each of several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, start: RunStart) -> None:
        """Tell that requests are about to be sent."""
        for observer in self._observers:
            observer.started(start)

    def record(self, request: RequestRecord) -> None:
        """Tell of a request that has ended."""
        for observer in self._observers:
            observer.record(request)

    def sample(self, sample: PoolSample) -> None:
        """Tell the state of the pools."""
        for observer in self._observers:
            observer.sample(sample)
