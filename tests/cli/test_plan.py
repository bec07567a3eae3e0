from rich.console import Console

from cli.plan import plan_view
from kvrelay.v1 import controller_pb2
from tests.cli.conftest import Run


def shown(response: controller_pb2.GetPlanResponse) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(plan_view(response))
    return captured.get()


def make_record(*, wanted: int, outcome: str) -> controller_pb2.PlanRecord:
    return controller_pb2.PlanRecord(
        age_s=3.0,
        prefill=controller_pb2.PoolPlan(present=2, wanted=wanted),
        decode=controller_pb2.PoolPlan(present=1, wanted=1),
        reason="many come",
        terms=[controller_pb2.PlanTerm(name="requests_per_s", value=7.25)],
        outcome=outcome,
    )


def test_plan_shows_sizes_reason_numbers_and_changes() -> None:
    record = make_record(wanted=3, outcome="under way")
    text = shown(controller_pb2.GetPlanResponse(mode="act", interval_s=10.0, latest=record, changes=[record]))
    assert "planner: act, every 10 s, the last time 3 s ago" in text
    assert "prefill 2 -> 3, decode 1" in text
    assert "many come [under way]" in text
    assert "requests_per_s  7.25" in text
    assert text.count("many come") == 2


def test_plan_that_is_off_says_how_to_turn_it_on() -> None:
    assert "planner.mode: advise or act" in shown(controller_pb2.GetPlanResponse(mode="off"))


def test_plan_before_the_first_one_says_so() -> None:
    assert "no plan yet" in shown(controller_pb2.GetPlanResponse(mode="act", interval_s=1.0))


def test_plan_watch_as_json_is_a_usage_error(run: Run) -> None:
    assert run("plan", "--watch", "--json").exit_code == 2
