"""A workload's sessions as requests of a simulation."""

from collections.abc import Sequence
from typing import Any

import pytest

from common.config import parse_config
from common.slo import Slo
from measure.experiment.arms import ArmPlan
from measure.experiment.points import Arm, Cell, Point
from measure.experiment.runner import CellFailed
from measure.experiment.simulated import simulate_point
from measure.experiment.spec import ExperimentSpec, SimulatedArm
from measure.experiment.users import Users
from measure.load.records import Outcome
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, SimRun
from measure.workload.build import build_workload
from measure.workload.lengths import Distribution
from measure.workload.sessions import Segment, Session, Stream, Turn, Workload
from measure.workload.spec import WorkloadSpec, parse_workload
from router.tenants import ANYBODY
from tests.measure.load.made_runs import make_failure
from tests.measure.load.workloads import session, workload
from tests.measure.simulate.builders import make_settings, make_shape

SLO = Slo(ttft_s=2.0, tpot_s=0.05, ttft_tokens=64)
BLOCK_SIZE = 16


def make_session(index: int, *, start_s: float = 0.0, num_turns: int = 1, kind: str = "chat") -> Session:
    """Return a session whose turns add 32 tokens each and are answered with 20, three seconds apart."""
    return session(index, start_s=start_s, turns=num_turns, think_s=3.0, tokens=32, num_output_tokens=20, kind=kind)


def make_workload(
    *streams: Stream | list[Session], duration_s: float = 100.0, max_requests: int | None = None
) -> Workload:
    """Return a workload of streams; those given as sessions are open loops."""
    made = [each if isinstance(each, Stream) else Stream(kind=each[0].kind, sessions=each) for each in streams]
    return workload(*made, duration_s=duration_s, max_requests=max_requests)


def serve(asked: Workload) -> SimRun:
    return run(make_shape(1, 1), make_settings(), Users(asked, slo=SLO).arrivals())


def test_open_loop_begins_sessions_of_all_streams_at_their_times_in_order() -> None:
    chats = [make_session(0, start_s=1.0), make_session(1, start_s=4.0)]
    singles = [make_session(2, start_s=0.5, kind="single"), make_session(3, start_s=2.0, kind="single")]
    finished = serve(make_workload(chats, singles))
    assert [(result.due_s, result.kind) for result in finished.requests] == [
        (0.5, "single"),
        (1.0, "chat"),
        (2.0, "single"),
        (4.0, "chat"),
    ]


def test_later_turn_holds_everything_said_before_and_finds_it_cached() -> None:
    finished = serve(make_workload([make_session(0, num_turns=3)]))
    assert [result.num_prompt_tokens for result in finished.requests] == [32, 84, 136]
    assert [result.server.num_cached_tokens for result in finished.requests] == [0, 48, 96]  # full blocks only
    for before, after in zip(finished.requests, finished.requests[1:], strict=False):
        assert after.due_s == before.end_s + 3.0


def test_answers_of_two_sessions_that_begin_alike_are_not_alike() -> None:
    alike = [Session(index=n, kind="chat", start_s=n * 20.0, turns=make_session(0, num_turns=2).turns) for n in (0, 1)]
    finished = serve(make_workload(alike))
    later = [result for result in finished.requests if result.num_prompt_tokens > 32]
    assert [result.server.num_cached_tokens for result in later] == [48, 48]  # not 64: its own answer


def test_closed_loop_begins_a_session_when_one_has_ended() -> None:
    stream = Stream(kind="chat", sessions=[make_session(n, num_turns=2) for n in range(4)], concurrency=2)
    finished = serve(make_workload(stream))
    results = finished.requests
    assert len(results) == 8
    assert [result.due_s for result in results[:2]] == [0.0, 0.0]
    first_turns = [result for result in results if result.num_prompt_tokens == 32]
    ends = sorted(result.end_s for result in results if result.num_prompt_tokens > 32)
    assert sorted(result.due_s for result in first_turns[2:]) == ends[:2]


def test_place_of_a_refused_session_is_taken_later_so_that_time_passes() -> None:
    stream = Stream(kind="chat", sessions=[make_session(n) for n in range(5)], concurrency=1)
    users = Users(make_workload(stream, duration_s=3.5), slo=SLO)
    following: Sequence[Arrival] = list(users.arrivals())
    times = []
    while following:
        (arrival,) = following
        times.append(arrival.at_s)
        assert arrival.follow_up is not None
        following = arrival.follow_up(make_failure(0, Outcome.REFUSED, due_s=arrival.at_s, end_s=arrival.at_s))
    assert times == [0.0, 1.0, 2.0, 3.0]


def test_session_ends_with_a_request_that_is_not_answered() -> None:
    turns = (Turn(segments=(Segment(1, 1200),), num_output_tokens=9), *make_session(0, num_turns=2).turns)
    session = Session(index=0, kind="chat", start_s=0.0, turns=turns)
    finished = serve(make_workload([session]))
    (result,) = finished.requests
    assert not result.is_complete
    assert result.error


@pytest.mark.parametrize(("duration_s", "max_requests", "num_begun"), [(2.0, None, 3), (100.0, 3, 2), (100.0, 4, 2)])
def test_no_session_begins_after_the_duration_or_after_so_many_requests(
    duration_s: float, max_requests: int | None, num_begun: int
) -> None:
    sessions = [make_session(n, start_s=float(n), num_turns=2) for n in range(9)]
    finished = serve(make_workload(sessions, duration_s=duration_s, max_requests=max_requests))
    assert len(finished.requests) == 2 * num_begun


def test_requests_state_the_objective_of_their_length() -> None:
    asked = make_workload([make_session(0), make_session(1, num_turns=2)])
    arrivals = list(Users(asked, slo=SLO).arrivals())
    assert [arrival.ttft_slo_s for arrival in arrivals] == [SLO.ttft_of(32)] * 2
    assert [arrival.max_tokens for arrival in arrivals] == [None, None]
    known = Users(asked, slo=SLO, max_tokens=512)
    assert [arrival.max_tokens for arrival in known.arrivals()] == [512, 512]


@pytest.mark.parametrize(("are_tenants", "names"), [(True, {"chat", "single"}), (False, {ANYBODY.name})])
def test_streams_are_tenants_of_their_own_where_that_is_asked(are_tenants: bool, names: set[str]) -> None:
    asked = make_workload([make_session(0)], [make_session(1, kind="single")])
    assert {arrival.tenant.name for arrival in Users(asked, slo=SLO, are_tenants=are_tenants).arrivals()} == names


SPEC = parse_workload(
    {
        "name": "mixed",
        "duration_s": 60,
        "streams": [
            {
                "name": "chats",
                "arrivals": {"rate": 0.3},
                "turns": 3,
                "think_s": 2,
                "first_tokens": 1000,
                "turn_tokens": 200,
                "output_tokens": 60,
            },
            {"name": "documents", "arrivals": {"rate": 0.2}, "first_tokens": 9000, "output_tokens": 20},
        ],
    },
    source="test",
)
EXPERIMENT = ExperimentSpec.model_validate(
    {
        "name": "mixed",
        "shapes": ["1P1D"],
        "workload": {},
        "loads": [1.0],
        "warm_up_s": 10.0,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
    }
)


def simulate(
    load: float, *, num_prefill: int = 1, num_decode: int = 1, spec: WorkloadSpec = SPEC, **simulated: Any
) -> tuple[Point, SimRun]:
    arm = Arm(name="arm", num_prefill=num_prefill, num_decode=num_decode)
    pool = {"block_size": 64, "max_step_tokens": 2048, "num_blocks": 4000}
    serving = parse_config({"pools": {"prefill": pool, "decode": pool}, "router": {"shed": "slo"}}, source="test")
    plan = ArmPlan(arm=arm, serving=serving, simulated=SimulatedArm(**simulated))
    return simulate_point(plan, build_workload(spec, load=load), EXPERIMENT, Cell(arm=arm.name, load=load, repeat=0))


def test_policy_of_a_replay_serves_an_arm_in_place_of_the_configured_one() -> None:
    ours, unshed = (simulate(4.0, policy=policy)[0].overall for policy in ("predictive", "predictive_without_shedding"))
    assert ours.num_not_complete > 0 == unshed.num_not_complete
    assert simulate(1.0, policy="round_robin")[1].requests != simulate(1.0)[1].requests


def test_planner_changes_the_pools_of_an_arm_which_pays_for_what_it_has() -> None:
    fixed, elastic = (simulate(0.1, num_prefill=3, planner=planner)[0] for planner in (None, "dynamo:0.5"))
    assert fixed.paid is not None and elastic.paid is not None
    assert fixed.paid.worker_s == pytest.approx(4 * (10.0 + fixed.duration_s), rel=0.1)
    assert (fixed.paid.num_leaves, elastic.paid.num_leaves) == (0, 2)
    assert elastic.paid.worker_s < fixed.paid.worker_s


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (0, 2)])
def test_simulated_point_counts_all_requests_and_each_kind_of_the_window(num_prefill: int, num_decode: int) -> None:
    point, finished = simulate(1.0, num_prefill=num_prefill, num_decode=num_decode)
    assert list(point.kinds) == ["all", "chats", "documents"]
    overall, chats, documents = point.kinds.values()
    assert overall.num_requests == chats.num_requests + documents.num_requests < len(finished.requests)
    assert overall.num_good == chats.num_good + documents.num_good
    assert overall.num_requests == sum(10.0 <= result.due_s <= 10.0 + point.duration_s for result in finished.requests)
    assert documents.ttft is not None and chats.ttft is not None
    assert documents.ttft.p50 > chats.ttft.p50
    assert (point.prefill_busy is None) == (num_prefill == 0)
    assert point.decode_busy is not None and 0 < point.decode_busy <= 1
    assert point.kv_peak is not None and 0 < point.kv_peak < 1
    assert (point.transfer_bytes > 0) == (num_prefill > 0)
    assert point.token_hit is not None and point.token_hit > 0.05


def test_point_warns_when_sessions_are_longer_than_the_warm_up() -> None:
    slow = SPEC.model_copy(
        update={
            "streams": tuple(
                stream.model_copy(update={"think_s": Distribution("constant", (300.0,))}) for stream in SPEC.streams[:1]
            )
        }
    )
    warned, calm = (simulate(2.0, num_prefill=0, num_decode=2, spec=spec)[0].warnings for spec in (slow, SPEC))
    assert warned == ("far fewer requests than the load came: the warm-up is too short for its sessions",)
    assert calm == ()


def test_run_that_ends_before_the_warm_up_fails_with_the_reason() -> None:
    with pytest.raises(CellFailed, match="no request was due between 10 s"):
        simulate(1.0, spec=SPEC.model_copy(update={"duration_s": 5, "streams": SPEC.streams[1:]}))
