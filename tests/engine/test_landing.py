"""Landings: a request that pulls its prefix first keeps its place in line, and takes nobody's pages."""

from common.clock import ManualClock
from common.errors import Refused
from engine.events import Started
from tests.builders import BLOCK_SIZE, Collector, assert_empty, make_core, make_request, run_until_idle, submit


def test_request_that_pulled_enters_at_the_place_of_its_arrival_and_tells_its_whole_wait() -> None:
    clock = ManualClock()
    core = make_core(max_running=1, clock=clock)
    _first, _ = submit(core, make_request(range(8), ignore_eos=True))
    core.step()
    request = make_request(range(20, 40), ignore_eos=True)
    landing = core.arrive(request.block_hashes[:4])
    assert core.landings.reserve(landing) is None
    later, told_later = submit(core, make_request(range(50, 60), ignore_eos=True))
    clock.advance(3.0)
    core.landings.commit(landing, 3)
    told = Collector()
    group = core.add(request, told, landing)
    assert not isinstance(group, Refused)
    assert core.scheduler.waiting == [group.leader, later.leader]
    run_until_idle(core)
    assert told.events[0] == Started(num_cached_tokens=3 * BLOCK_SIZE, queue_s=3.0, num_pulled_tokens=3 * BLOCK_SIZE)
    assert len(told_later.outputs) == 8
    assert_empty(core)


def test_pull_is_granted_no_page_that_the_first_in_line_needs() -> None:
    core = make_core(num_blocks=16, max_running=1)
    running, _ = submit(core, make_request(range(16), max_tokens=9, ignore_eos=True))
    core.step()
    submit(core, make_request(range(40, 64), ignore_eos=True))  # six pages, one more is spared for growth
    num_left = core.pool.num_free - 7
    landing = core.arrive(make_request(range(100, 164)).block_hashes[: num_left + 1])
    assert isinstance(core.landings.reserve(landing), Refused)
    landing = core.arrive(landing.hashes[:num_left])
    assert core.landings.reserve(landing) is None
    core.landings.release(landing)
    core.cancel(running)


def test_block_that_a_sibling_publishes_meanwhile_takes_the_place_of_the_pulled_one() -> None:
    core = make_core()
    request = make_request(range(12), max_tokens=1)
    landing = core.arrive(request.block_hashes[:2])
    core.landings.reserve(landing)
    pulled = landing.block_ids()
    submit(core, request)
    run_until_idle(core)
    core.landings.commit(landing, 2)
    assert not set(landing.block_table) & set(pulled)
    assert landing.retired_blocks == list(pulled)
    core.landings.release(landing)
    assert_empty(core)
