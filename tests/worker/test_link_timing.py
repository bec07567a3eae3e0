"""A worker learns the speed of its links from pulls, and tries a slow one again, less and less often."""

import random

import pytest

from common.ids import WorkerId
from common.timing import timing_from_proto, timing_to_proto
from tests.clock import ManualClock
from worker.timing import LINK_MEMORY_S, MAX_LINK_MEMORY_S, WorkerTiming

PEER = WorkerId("p0")
SHM, GRPC = 2, 1


def test_link_learns_latency_and_bandwidth_of_a_peer_and_of_all() -> None:
    timing = WorkerTiming(max_step_tokens=512, clock=ManualClock())
    rng = random.Random(0)
    for _ in range(200):
        num_bytes = rng.randint(1 << 16, 1 << 28)
        outlier = 10.0 if rng.random() < 0.1 else 1.0
        timing.observe_pull(PEER, SHM, num_bytes=num_bytes, seconds=outlier * (2e-3 + num_bytes / 3e9))
    for peer in (PEER, WorkerId("never seen")):
        assert timing.model.pull_s(peer, 1 << 28) == pytest.approx(2e-3 + (1 << 28) / 3e9, rel=0.05)
        assert timing.model.pull_s(peer, 1 << 16) == pytest.approx(2e-3 + (1 << 16) / 3e9, rel=0.1)


def test_rate_of_reads_from_tiers_is_learnt_and_sent_to_routers() -> None:
    timing = WorkerTiming(max_step_tokens=512, clock=ManualClock())
    timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=0.001)
    assert timing.model.tier_read is None
    version, rng = timing.version, random.Random(0)
    for _ in range(200):
        num_bytes = rng.randint(1 << 16, 1 << 28)
        timing.observe_tier_read(num_bytes, 1e-3 + num_bytes / 2e9)
    assert timing.version > version, "routers are told"
    assert timing.model.tier_read_s(1 << 28) == pytest.approx(1e-3 + (1 << 28) / 2e9, rel=0.05)
    assert timing.model.tier_read_s(0) == 0
    report = timing_to_proto(timing.model, timing.transports)
    assert timing_from_proto(report) == timing.model
    report.tier_read.bytes_per_s = 0
    assert timing_from_proto(report).tier_read is None
    report.tier_read.bytes_per_s = -1
    with pytest.raises(ValueError, match=r"timing\.tier_read\.bytes_per_s"):
        timing_from_proto(report)


def test_link_model_starts_over_when_the_transport_changes() -> None:
    timing = WorkerTiming(max_step_tokens=512, clock=ManualClock())
    for _ in range(50):
        timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=0.001)
    timing.observe_pull(PEER, GRPC, num_bytes=1 << 24, seconds=0.1)
    assert timing.transports == {PEER: GRPC}
    assert timing.model.pull_s(PEER, 1 << 24) == pytest.approx(0.1, rel=0.01)


def test_slow_link_is_tried_again() -> None:
    """A link that was slow gets no further pulls: unless it is forgotten, its pair of workers stays unused for good."""
    clock, other = ManualClock(), WorkerId("p1")
    timing = WorkerTiming(max_step_tokens=512, clock=clock)
    timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=5.0)
    version = timing.version
    for _ in range(20):
        timing.observe_pull(other, SHM, num_bytes=1 << 24, seconds=0.001)
    clock.advance(LINK_MEMORY_S)
    timing.forget_links()
    assert timing.version > version, "routers are told"
    assert timing.model.links.keys() == {other, None}
    assert timing.model.pull_s(PEER, 1 << 24) == pytest.approx(0.001, rel=0.1)
    timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=0.001)
    assert timing.model.pull_s(PEER, 1 << 24) == pytest.approx(0.001, rel=0.01), "what it was before is forgotten"


def test_worker_whose_only_link_was_slow_assumes_nothing_about_its_peers_for_long() -> None:
    clock = ManualClock()
    timing = WorkerTiming(max_step_tokens=512, clock=clock)
    timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=5.0)
    clock.advance(LINK_MEMORY_S - 0.1)
    timing.forget_links()
    assert timing.model.pull_s(WorkerId("p1"), 1 << 24) == pytest.approx(5.0)
    clock.advance(0.1)
    timing.forget_links()
    assert not timing.model.links, "the router gives it the usual link"


def test_link_that_stays_slow_is_tried_more_and_more_rarely() -> None:
    clock = ManualClock()
    timing = WorkerTiming(max_step_tokens=512, clock=clock)
    kept_s: list[float] = []
    for _ in range(6):
        timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=5.0)
        since_s = clock.monotonic()
        while timing.model.links:
            clock.advance(1.0)
            timing.forget_links()
        kept_s.append(clock.monotonic() - since_s)
    assert kept_s == [10.0, 20.0, 40.0, 80.0, MAX_LINK_MEMORY_S, MAX_LINK_MEMORY_S]


def test_pulls_of_links_that_are_all_forgotten_say_nothing_of_other_peers() -> None:
    clock = ManualClock()
    timing = WorkerTiming(max_step_tokens=512, clock=clock)
    peers = [WorkerId(f"p{number}") for number in range(6)]
    for peer in peers:
        timing.observe_pull(peer, SHM, num_bytes=1 << 24, seconds=5.0)
    clock.advance(LINK_MEMORY_S)
    timing.forget_links()
    timing.observe_pull(peers[0], SHM, num_bytes=1 << 24, seconds=0.001)
    assert timing.model.pull_s(peers[1], 1 << 24) == pytest.approx(0.001, rel=0.01)


def test_well_known_link_is_kept_for_longer() -> None:
    clock = ManualClock()
    timing = WorkerTiming(max_step_tokens=512, clock=clock)
    for _ in range(100):
        timing.observe_pull(PEER, SHM, num_bytes=1 << 24, seconds=5.0)
    clock.advance(MAX_LINK_MEMORY_S - 0.1)
    timing.forget_links()
    assert timing.model.pull_s(PEER, 1 << 24) == pytest.approx(5.0)
    clock.advance(0.1)
    timing.forget_links()
    assert not timing.model.links
