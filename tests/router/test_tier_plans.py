"""Plans whose blocks are in tiers only: they are read back, one read after the other, unless computing is faster."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import Epoch, WorkerId
from common.timing import LinkModel, TimingModel
from router.placement.loads import ProjectedLoad
from router.placement.plans import PlacementRequest, Plan, Pull
from router.placement.policies.prices import MIN_PULLED_BLOCKS, PREFILL_WORK_PRICE, compute_on, pull_sources
from tests.router.fleets import TIMING, choose, fleet, policy, request, worker
from tests.router.members import make_member

BLOCK_BYTES = 1000
P0, P1, D0 = WorkerId("p0"), WorkerId("p1"), WorkerId("d0")


def reading(block_s: float) -> TimingModel:
    """Return a model of a worker that computes 16 ms a block, and reads from its tiers and pulls in these seconds."""
    link = LinkModel(latency_s=0.0, bytes_per_s=BLOCK_BYTES / block_s, num_samples=9)
    return replace(TIMING, tier_read=link, links={None: replace(link, bytes_per_s=1e9)})


def asking(cached: Mapping[str, int], in_pages: Mapping[str, int]) -> PlacementRequest:
    """Return a request of 100 blocks, the last of which no cache can save."""
    pages = {WorkerId(name): count for name, count in in_pages.items()}
    return request(1600, cached=cached, num_in_pages=lambda worker_id: pages.get(worker_id, cached.get(worker_id, 0)))


def plan(asked: PlacementRequest, *workers: ProjectedLoad) -> Plan:
    return choose(policy("predictive"), asked, fleet(*workers, block_bytes=BLOCK_BYTES))


def terms(chosen: Plan) -> Mapping[str, float]:
    return chosen.candidates()[0].terms


def test_blocks_of_a_tier_are_read_where_that_is_faster_and_the_plan_says_it() -> None:
    chosen = plan(asking({"p0": 90}, {"p0": 40}), worker("p0", timing=reading(0.002)), worker("d0"))
    assert (chosen.prefill, chosen.predicted_cached_tokens) == (P0, 90 * 16)
    assert chosen.tier_reads == {P0: 50}
    assert terms(chosen)["tier_read"] == chosen.predicted_tier_read_s == pytest.approx(0.1)
    assert chosen.predicted_ttft_s == pytest.approx(0.1 + 0.16, abs=0.01)
    assert "50 blocks from tiers" in chosen.reason


def test_blocks_of_a_slow_tier_count_as_not_cached() -> None:
    chosen = plan(asking({"p0": 90}, {"p0": 40}), worker("p0", timing=reading(0.05)), worker("d0"))
    assert (chosen.predicted_cached_tokens, chosen.tier_reads, chosen.predicted_tier_read_s) == (40 * 16, {}, 0.0)
    assert "tier_read" not in terms(chosen)


def test_read_queues_behind_those_under_way_and_a_wait_for_other_prompts_hides_it() -> None:
    asked, timing = asking({"p0": 90}, {"p0": 0}), reading(0.001)
    after = plan(asked, worker("p0", timing=timing, tier_free_at_s=0.3), worker("d0"))
    assert after.predicted_tier_read_s == pytest.approx(0.3 + 0.09)
    hidden = plan(asked, worker("p0", timing=timing, prefill_free_at_s=0.5), worker("d0"))
    assert (hidden.predicted_tier_read_s, hidden.tier_reads) == (0.0, {P0: 90})
    late = plan(asked, worker("p0", timing=timing, tier_free_at_s=60.0), worker("d0"))
    assert (late.predicted_cached_tokens, late.tier_reads) == (0, {}), "computing is faster than waiting for the disk"


def test_worker_with_the_blocks_in_pages_is_preferred_to_one_that_must_read() -> None:
    workers = worker("p0", timing=reading(0.002)), worker("p1", timing=reading(0.002)), worker("d0")
    assert plan(asking({"p0": 90, "p1": 90}, {"p0": 10}), *workers).prefill == P1


def test_source_of_a_pull_reads_its_tier_first_or_gives_only_what_is_in_its_pages() -> None:
    asked = asking({"p1": 90}, {"p1": 30})
    fast = worker("p1", timing=reading(0.002), prefill_free_at_s=9.0)
    chosen = plan(asked, worker("p0", timing=reading(0.002)), fast, worker("d0"))
    assert (chosen.prefill, chosen.pull) == (P0, Pull(source=P1, num_blocks=90))
    assert chosen.tier_reads == {P1: 60}
    assert terms(chosen)["tier_read"] == pytest.approx(0.12)
    slow = replace(fast, timing=reading(0.1))
    chosen = plan(asked, worker("p0", timing=reading(0.002)), slow, worker("d0"))
    assert (chosen.pull, chosen.tier_reads) == (Pull(source=P1, num_blocks=30), {})


def test_decode_worker_gets_offloaded_blocks_with_the_handoff() -> None:
    timing = replace(TIMING, links={None: LinkModel(latency_s=0.0, bytes_per_s=BLOCK_BYTES / 0.001)})
    workers = worker("p0"), worker("d0", timing=timing, num_decodes=40)
    in_pages = terms(plan(asking({"d0": 90}, {}), *workers))["transfer"]
    offloaded = terms(plan(asking({"d0": 90}, {"d0": 0}), *workers))["transfer"]
    assert offloaded > in_pages


@pytest.mark.parametrize("name", ["dynamo", "llm_d", "mooncake", "longest_prefix"])
def test_other_policies_count_offloaded_blocks_as_cached(name: str) -> None:
    workers = [worker(each, timing=reading(9.0)) for each in ("p0", "p1", "d0")]
    for cached in ({"p0": 90}, {"p1": 90}, {}):
        plans = [
            choose(policy(name, seed=1), asking(cached, in_pages), fleet(*workers, block_bytes=BLOCK_BYTES))
            for in_pages in ({}, dict.fromkeys(cached, 0))
        ]
        assert plans[0].prefill == plans[1].prefill
        assert plans[0].predicted_cached_tokens == plans[1].predicted_cached_tokens


@given(
    held=st.integers(0, 99),
    offloaded=st.integers(0, 99),
    source=st.integers(0, 99),
    source_offloaded=st.integers(0, 99),
    block_s=st.floats(1e-4, 0.1),
    waits_s=st.tuples(st.floats(0, 3), st.floats(0, 3)),
)
def test_tier_makes_no_plan_dearer_than_without_it_nor_cheaper_than_pages(
    held: int, offloaded: int, source: int, source_offloaded: int, block_s: float, waits_s: tuple[float, float]
) -> None:
    timing = reading(block_s)
    computes = worker("p0", timing=timing, prefill_free_at_s=waits_s[0], tier_free_at_s=waits_s[1])
    view = fleet(computes, worker("p1", timing=timing), block_bytes=BLOCK_BYTES)

    def cost(cached: Mapping[str, int], in_pages: Mapping[str, int]) -> float:
        asked = asking(cached, in_pages)
        sources = pull_sources(asked, view, asked.best_holders(4))
        return compute_on(asked, view, sources, computes, work_price=PREFILL_WORK_PRICE)[0]

    everything = {"p0": held, "p1": source}
    pages = {"p0": max(0, held - offloaded), "p1": max(0, source - source_offloaded)}
    # So few blocks are never pulled: one more in the worker's own pages may leave a source with too few.
    spared_s = (1 + PREFILL_WORK_PRICE) * timing.prefill_s(MIN_PULLED_BLOCKS * 16, 1600) + 1e-9
    assert cost(everything, {}) <= cost(everything, pages) + spared_s
    assert cost(everything, pages) <= cost(pages, {}) + spared_s


def test_booked_reads_queue_on_their_worker_until_their_time_has_passed() -> None:
    member = make_member()
    assert member.facts is not None
    member.facts = replace(member.facts, block_bytes=BLOCK_BYTES)
    member.take_timing(reading(0.01))
    member.add_tier_read(10, now_s=5.0)
    member.add_tier_read(20, now_s=5.0)
    load = member.load()
    assert load.tier_free_at_s == pytest.approx(5.3)
    assert load.tier_read_s(10 * BLOCK_BYTES, 5.0) == pytest.approx(0.4)
    assert load.tier_read_s(10 * BLOCK_BYTES, 99.0) == pytest.approx(0.1)
    assert load.tier_read_s(0, 5.0) == 0
    member.begin_life(replace(member.facts, epoch=Epoch(2)))
    assert member.load().tier_free_at_s == 0
