"""Plans with a pull: only the computing worker learns where the leading blocks are."""

from dataclasses import replace
from typing import Any

import pytest

from common.errors import Refused
from common.ids import WorkerId
from router.placement.plans import FleetView, PlacementRequest, Plan, Pull
from tests.router.fake_worker import DECODE, PREFILL, FakeWorker
from tests.router.fakes import Reply, make_request, running_cluster


class PullingPolicy:
    """A policy that always returns the same plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def choose(self, _request: PlacementRequest, _fleet: FleetView) -> Plan | Refused:
        return self.plan


REMOTE = Plan(
    prefill=WorkerId("p0"),
    answering=WorkerId("d0"),
    predicted_cached_tokens=8,
    reason="for the test",
    pull=Pull(source=WorkerId("p1"), num_blocks=2),
)
LOCAL = replace(REMOTE, prefill=None)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes routers of this test choose a plan."""

    def set_plan(plan: Plan) -> None:
        monkeypatch.setattr("router.parts.POLICIES", {"predictive": lambda _settings: PullingPolicy(plan)})

    return set_plan


def workers() -> dict[str, FakeWorker]:
    made = [FakeWorker("p0", PREFILL), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)]
    for worker in made:
        worker.num_cached_tokens, worker.num_pulled_tokens = 8, 4
    return {worker.worker_id: worker for worker in made}


def plan_of(reply: Reply) -> tuple[str, int]:
    return reply.plans[0].source_worker_id, reply.plans[0].num_source_blocks


@pytest.mark.parametrize(("plan", "computes"), [(REMOTE, "p0"), (LOCAL, "d0")])
async def test_computing_worker_gets_the_source_and_the_client_the_pulled_tokens(
    plan: Plan, computes: str, choose: Any
) -> None:
    choose(plan)
    fleet = workers()
    async with running_cluster(*fleet.values()) as cluster:
        reply = await cluster.generate(make_request())
        assert plan_of(reply) == ("p1", 2)
        usage = reply.completed.usage
        assert (usage.num_cached_tokens, usage.num_pulled_tokens) == (8, 4)
        source = fleet[computes].requests[0].source
        expected = ("p1", fleet["p1"].address, fleet["p1"].epoch, 2)
        assert (source.worker_id, source.address, source.epoch, source.num_blocks) == expected
        assert not fleet["p1"].requests
        assert computes == "d0" or not fleet["d0"].requests[0].HasField("source")
        await cluster.until_idle()


async def test_source_that_is_lost_when_the_plan_is_booked_is_left_out(choose: Any) -> None:
    choose(REMOTE)
    fleet = workers()
    async with running_cluster(*fleet.values()) as cluster:
        await fleet["p1"].die()
        await cluster.until_state("p1", "lost")
        reply = await cluster.generate(make_request())
        assert plan_of(reply) == ("", 0)
        assert not fleet["p0"].requests[0].HasField("source")


async def test_unknown_source_is_left_out(choose: Any) -> None:
    choose(replace(REMOTE, pull=Pull(source=WorkerId("p7"), num_blocks=2)))
    fleet = workers()
    async with running_cluster(*fleet.values()) as cluster:
        assert plan_of(await cluster.generate(make_request())) == ("", 0)
