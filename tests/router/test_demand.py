import pytest

from common.errors import Unauthenticated
from common.slo import Slo
from router.record.demand import NUM_SAMPLED, REMEMBERED_S, Answered, DemandMeter
from tests.clock import ManualClock
from tests.router.fake_worker import DECODE, FakeWorker
from tests.router.fakes import make_request, running_cluster
from tests.router.http.clients import fetch
from tests.router.test_tenants import KEYS, serving


def make_answer(*, num_prompt_tokens: int = 100, ttft_s: float = 0.1, tpot_s: float | None = 0.01) -> Answered:
    return Answered(
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens // 2,
        num_read_tokens=num_prompt_tokens // 4,
        num_evicted_tokens=num_prompt_tokens // 5,
        num_output_tokens=7,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


class Harness:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.meter = DemandMeter(self.clock)

    def arrive(self, *counts: int) -> None:
        """Note these numbers of arrivals in the next seconds."""
        for count in counts:
            for _ in range(count):
                self.meter.note_arrival()
            self.clock.advance(1.0)


def test_demand_counts_the_last_full_seconds_only() -> None:
    harness = Harness()
    harness.arrive(5, 1, 2, 3)
    harness.meter.note_arrival()  # of the second that is not over
    demand = harness.meter.demand(3.0, num_queued=4, num_queued_tokens=400)
    assert (demand.window_s, demand.num_arrived) == (3.0, 6)
    assert (demand.num_queued, demand.num_queued_tokens) == (4, 400)


def test_demand_of_a_young_router_says_how_long_it_has_run() -> None:
    harness = Harness()
    assert harness.meter.demand(10.0, num_queued=0, num_queued_tokens=0).window_s == 0.0
    harness.arrive(1, 1)
    demand = harness.meter.demand(10.0, num_queued=0, num_queued_tokens=0)
    assert (demand.window_s, demand.num_arrived) == (2.0, 2)


def test_demand_forgets_what_is_older_than_its_memory() -> None:
    harness = Harness()
    harness.arrive(9, *[0] * REMEMBERED_S)
    demand = harness.meter.demand(1e6, num_queued=0, num_queued_tokens=0)
    assert (demand.window_s, demand.num_arrived) == (REMEMBERED_S, 0)


def test_demand_counts_refusals_and_answers_within_the_objectives() -> None:
    harness = Harness()
    harness.meter.judge_by(Slo(ttft_s=1.0, tpot_s=0.05, ttft_tokens=1000))
    harness.meter.note_refusal()
    harness.meter.note_answer(make_answer(ttft_s=1.0))
    harness.meter.note_answer(make_answer(ttft_s=1.5))
    harness.meter.note_answer(make_answer(ttft_s=1.5, num_prompt_tokens=2000))
    harness.meter.note_answer(make_answer(tpot_s=0.06))
    harness.meter.note_answer(make_answer(tpot_s=None))
    harness.clock.advance(1.0)
    demand = harness.meter.demand(5.0, num_queued=0, num_queued_tokens=0)
    assert (demand.num_refused, demand.num_finished, demand.num_good) == (1, 5, 3)
    assert (demand.ttft_p90_s, demand.tpot_p90_s) == (1.5, 0.06)
    shape = demand.shapes[0]
    assert (shape.num_computed_tokens, shape.num_output_tokens) in ((50, 7), (1000, 7))
    assert shape.num_read_tokens * 2 == shape.num_computed_tokens
    assert 0 < shape.num_evicted_tokens < shape.num_computed_tokens


def test_demand_without_answers_has_no_percentiles() -> None:
    harness = Harness()
    harness.arrive(3)
    demand = harness.meter.demand(5.0, num_queued=0, num_queued_tokens=0)
    assert (demand.shapes, demand.ttft_p90_s, demand.tpot_p90_s) == ((), None, None)


def test_demand_samples_busy_and_quiet_seconds_by_their_share() -> None:
    harness = Harness()
    for count, size in ((3000, 10), (1000, 20)):
        for _ in range(count):
            harness.meter.note_answer(make_answer(num_prompt_tokens=size))
        harness.clock.advance(1.0)
    demand = harness.meter.demand(5.0, num_queued=0, num_queued_tokens=0)
    assert len(demand.shapes) == NUM_SAMPLED
    num_of_busy = sum(shape.num_prompt_tokens == 10 for shape in demand.shapes)
    assert 0.6 < num_of_busy / NUM_SAMPLED < 0.9


@pytest.mark.parametrize(("counts", "expected"), [([4] * 20, 0.0), ([20, 0, 0, 0, 0] * 4, 16.842), ([0] * 20, 1.0)])
def test_demand_distinguishes_even_from_bursty_arrivals(counts: list[int], expected: float) -> None:
    harness = Harness()
    harness.arrive(*counts)
    demand = harness.meter.demand(10.0, num_queued=0, num_queued_tokens=0)
    assert demand.burstiness == pytest.approx(expected, abs=1e-3)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[DemandMeter]:
    """Return the meters of all noted arrivals."""
    noted: list[DemandMeter] = []
    monkeypatch.setattr(DemandMeter, "note_arrival", lambda meter: noted.append(meter))
    return noted


async def test_calls_without_a_key_are_no_demand_that_scales_the_pools(arrivals: list[DemandMeter]) -> None:
    async with running_cluster(FakeWorker("d0", DECODE), config=serving(http_port=0)) as cluster:
        with pytest.raises(Unauthenticated):
            await cluster.generate(make_request())
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await fetch(cluster.router.http_port, "POST", path, b'{"prompt": "x"}'))[0] == 401
        assert arrivals == []
        assert (await cluster.status()).router.num_rejected == 3


@pytest.mark.usefixtures("no_refill")
async def test_every_request_of_a_known_caller_is_demand_once_by_either_door(arrivals: list[DemandMeter]) -> None:
    config = serving(http_port=0, a={"requests_per_min": 3}, local_prefill_max_tokens=64)
    async with running_cluster(FakeWorker("d0", DECODE), config=config) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as client:
            await client.generate([1, 2, 3], max_tokens=1)
        assert len(arrivals) == 1
        key = f"Bearer {KEYS['a']}"
        bodies = (b'{"prompt": ["x", "y"], "max_tokens": 1}', b'{"prompt": "refused", "max_tokens": 1}')
        port = cluster.router.http_port
        answers = [await fetch(port, "POST", "/v1/completions", body, authorization=key) for body in bodies]
        assert [status for status, *_rest in answers] == [200, 429]
        assert len(arrivals) == 4
