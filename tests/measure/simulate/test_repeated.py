"""A simulation is a function of its input: it follows no hashes or addresses, which differ between processes."""

import os
import subprocess
import sys

from measure.simulate.cluster import run
from tests.measure.simulate.builders import make_arrivals, make_settings, make_shape
from tests.measure.simulate.test_pools import run_scripted


def results() -> str:
    """Return everything that two routers and pools which change leave behind."""
    fixed = run(make_shape(2, 2, num_routers=2), make_settings(seed=7), make_arrivals(60))
    changing, _ = run_scripted([(3, 1), (1, 3), (4, 4), (2, 2)], flip_s=0.5)
    return repr([(done.requests, done.workers, done.stays, done.end_s) for done in (fixed, changing)])


def test_runs_with_the_same_seed_give_the_same_bytes_in_another_process() -> None:
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import results; print(results())"],
        env=os.environ | {"PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip("\n") == results()
