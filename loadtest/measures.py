"""Makes a summary of a run's records."""

from loadtest.records import Run
from loadtest.summary import Summary
from workload.slo import Slo


def summarize(run: Run, *, slo: Slo, warm_up_s: float | None = None, cool_down_s: float | None = None) -> Summary:
    """Return what a run was worth under `slo`.

    Requests that were due in the first `warm_up_s` (None: 10 % of the arrivals) and the last `cool_down_s` (None: after
    the last session began) are left out. Raises NothingMeasured when no request is left.
    """
    raise NotImplementedError
