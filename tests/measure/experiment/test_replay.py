"""A trace under policies, as the experiment that `kvrelay simulate` runs."""

from pathlib import Path
from typing import Any

import pytest

from common.config import parse_config
from measure.experiment.replay import Replay
from measure.experiment.runner import ResultKeeper
from measure.experiment.search import measure, measure_side_by_side
from measure.experiment.simulated import SimulatedBench, simulation_of
from measure.experiment.spec import ExperimentError, SimulateSpec
from measure.experiment.store import Store
from measure.simulate.records import TierShape
from measure.simulate.store import read_requests

SMALL = Path(__file__).parents[2] / "data" / "small.jsonl"
NUM_REQUESTS = 20


def make_replay(
    *policies: str, num_requests: int = NUM_REQUESTS, loads: tuple[float, ...] = (1.0,), **simulate: Any
) -> Replay:
    """Return a replay on 1P2D; extra arguments are keys of `simulate`, and `block_size` and `num_blocks` of pools."""
    pool = {"block_size": simulate.pop("block_size", 512), "num_blocks": simulate.pop("num_blocks", 400)}
    pools = {"prefill": pool | {"count": 1}, "decode": pool | {"count": 2}}
    return Replay(
        trace=SMALL,
        num_requests=num_requests,
        loads=loads,
        policies=policies or ("round_robin", "predictive"),
        serving=parse_config({"launcher": "local", "pools": pools}, source="test"),
        simulate=SimulateSpec.model_validate(simulate),
    )


def run(replay: Replay, out: Path, *, num_jobs: int = 1) -> dict[str, bytes]:
    """Return all files of the run that are functions of the settings."""
    experiment, store, lines = replay.experiment(), Store(out), list[str]()
    store.claim(experiment.fingerprint())
    if num_jobs > 1:
        measure_side_by_side(experiment, store, num_jobs=num_jobs, is_search=False, report=lines.append)
    keeper = ResultKeeper(store, experiment.source, lines.append)
    measure(experiment, keeper, SimulatedBench(experiment.spec, experiment.workloads), is_search=False)
    paths = (path for path in sorted(out.rglob("*.json*")) if path.name != "clock.json")
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def test_two_runs_are_equal_byte_for_byte_in_one_process_and_in_two(tmp_path: Path) -> None:
    alone, together = run(make_replay(), tmp_path / "alone"), run(make_replay(), tmp_path / "together", num_jobs=2)
    assert len(alone) == 1 + 2 * 3
    assert together == alone


def test_every_request_of_the_trace_has_one_result_at_every_speed(tmp_path: Path) -> None:
    run(make_replay("round_robin", loads=(0.7, 3.0)), tmp_path)
    slow, fast = Store(tmp_path).points()
    assert fast.load / slow.load == pytest.approx(3.0 / 0.7)
    for point, speed in ((slow, 0.7), (fast, 3.0)):
        requests = list(read_requests(Store(tmp_path).folder(point.source, point.cell) / "requests.jsonl"))
        assert [request.index for request in requests] == list(range(NUM_REQUESTS))
        assert point.overall.num_requests == NUM_REQUESTS
        trace = make_replay(loads=(speed,)).experiment().workloads.simulated(point.cell, seconds=0).streams[0]
        assert [request.due_s for request in requests] == [session.start_s for session in trace.sessions]


def test_requests_that_come_at_once_are_replayed(tmp_path: Path) -> None:
    run(make_replay("round_robin", num_requests=1), tmp_path)
    (point,) = Store(tmp_path).points()
    assert (point.overall.num_complete, point.warnings) == (1, ())


def test_pages_that_do_not_divide_the_traces_blocks_are_refused() -> None:
    with pytest.raises(ExperimentError, match="pages of 96 tokens do not divide the trace's blocks of 512"):
        make_replay(block_size=96).experiment()


def test_worker_that_is_too_small_for_a_request_is_refused() -> None:
    with pytest.raises(ExperimentError, match="a decode worker has 3 pages of 512"):
        make_replay(num_blocks=3).experiment()


def test_tiers_have_one_size_in_bytes_or_blocks_and_serve_a_replay(tmp_path: Path) -> None:
    tiers = [{"gib": 1.0, "gb_per_s": 50.0}, {"num_blocks": 7, "gb_per_s": 0.5}]
    replay = make_replay("predictive", tiers=tiers)
    experiment = replay.experiment()
    shape, _settings = simulation_of(experiment.arms.plans[0], experiment.spec)
    assert shape.tiers == (
        TierShape(num_blocks=2**30 // shape.block_bytes, bytes_per_s=50e9),
        TierShape(num_blocks=7, bytes_per_s=0.5e9),
    )
    run(replay, tmp_path)
    (point,) = Store(tmp_path).points()
    assert point.overall.num_complete == NUM_REQUESTS
    for wrong in ({"gb_per_s": 1.0}, tiers[0] | tiers[1]):
        with pytest.raises(ValueError, match="a tier has gib or num_blocks"):
            make_replay(tiers=[wrong])


def test_settings_are_told_by_content_of_files() -> None:
    assert str(SMALL) not in str(make_replay().experiment().fingerprint())


def test_perfect_signals_come_at_once_however_late_the_others_are(tmp_path: Path) -> None:
    policies = ("greedy_perfect_signals", "least_load")
    soon = run(make_replay(*policies, num_requests=60), tmp_path / "soon")
    late = run(make_replay(*policies, num_requests=60, report_interval_s=5.0, event_lag_s=1.0), tmp_path / "late")
    fates = (name for name in soon if name.endswith("requests.jsonl"))
    assert {name.split("/")[1].partition("@")[0] for name in fates if soon[name] != late[name]} == {"least_load"}
