"""Landings: a request that pulls its prefix keeps its place in line and takes no other request's pages."""

from collections.abc import Sequence

from common.errors import Refused
from engine.core import EngineCore
from engine.events import Started
from engine.steps.group import Group
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    granted,
    make_core,
    make_request,
    run_until_idle,
    served,
    submit,
)
from tests.clock import ManualClock


def test_request_that_pulled_enters_in_order_of_arrival_and_reports_its_whole_wait() -> None:
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
    group = granted(core.add(request, told, landing))
    assert core.scheduler.waiting == [group.leader, later.leader]
    run_until_idle(core)
    assert told.events[0] == Started(num_cached_tokens=3 * BLOCK_SIZE, queue_s=3.0, num_pulled_tokens=3 * BLOCK_SIZE)
    assert len(told_later.outputs) == 8
    assert_empty(core)


def test_pull_is_granted_no_page_that_the_first_in_line_needs() -> None:
    core = make_core(num_blocks=16, max_running=1)
    running, _ = submit(core, make_request(range(16), max_tokens=9, ignore_eos=True))
    core.step()
    submit(core, make_request(range(40, 64), ignore_eos=True))  # six pages, and one more stays free for growth
    num_left = core.pool.num_free - 7
    landing = core.arrive(make_request(range(100, 164)).block_hashes[: num_left + 1])
    assert isinstance(core.landings.reserve(landing), Refused)
    landing = core.arrive(landing.hashes[:num_left])
    assert core.landings.reserve(landing) is None
    core.landings.release(landing)
    core.cancel(running)


def land(core: EngineCore, prompt: Sequence[int], num_blocks: int) -> tuple[Group, Collector] | Refused:
    """Pull the first blocks of a prompt and put its request in line."""
    request, told = make_request(prompt, max_tokens=1), Collector()
    landing = core.arrive(request.block_hashes[:num_blocks])
    refused = core.landings.reserve(landing)
    if refused is not None:
        return refused
    core.landings.commit(landing, num_blocks)
    group = granted(core.add(request, told, landing))
    return group, told


def num_pulled(told: Collector) -> int:
    """Return how many of its pulled blocks a request found when it started."""
    started = told.events[0]
    assert isinstance(started, Started)
    return started.num_pulled_tokens // BLOCK_SIZE


def test_pulled_blocks_of_waiting_requests_survive_later_pulls() -> None:
    core = make_core(num_blocks=25, max_running=1)
    submit(core, make_request(range(8), max_tokens=4, ignore_eos=True))
    core.step()
    landed = [land(core, range(begin, begin + 27), 6) for begin in (10, 40, 70, 100)]
    run_until_idle(core)
    assert [None if isinstance(each, Refused) else num_pulled(each[1]) for each in landed] == [6, 6, 6, None]
    assert_empty(core)


def test_growing_request_takes_back_pulled_pages_of_the_latest_in_line() -> None:
    core = make_core(num_blocks=20, max_running=1)
    submit(core, make_request(range(8), max_tokens=48, ignore_eos=True))  # 14 pages in the end
    core.step()
    first, second = (granted(land(core, range(begin, begin + 20), 4)) for begin in (100, 150))
    run_until_idle(core)
    assert core.scheduler.num_preemptions == 0
    assert num_pulled(first[1]) == 4
    assert num_pulled(second[1]) < 4
    assert_empty(core)


def test_first_in_line_takes_pulled_pages_of_those_behind_it() -> None:
    core = make_core(num_blocks=16, max_running=1)
    submit(core, make_request(range(8), max_tokens=6, ignore_eos=True))
    core.step()
    landed = granted(land(core, range(100, 120), 4))
    early = make_request(range(200, 260), max_tokens=1)
    landing = core.arrive(early.block_hashes[:0])
    landing.order = 0  # it arrived before, and its pull took long
    told = Collector()
    core.add(early, told, landing)
    run_until_idle(core)
    assert len(told.outputs) == 1
    assert len(landed[1].outputs) == 1
    assert_empty(core)


def test_request_that_leaves_the_line_releases_its_pulled_pages() -> None:
    core = make_core(max_running=1)
    running, _ = submit(core, make_request(range(8), ignore_eos=True))
    core.step()
    landed = granted(land(core, range(100, 120), 4))
    core.cancel(landed[0])
    core.cancel(running)
    run_until_idle(core)
    assert_empty(core)


def test_block_that_a_sibling_publishes_first_replaces_the_pulled_one() -> None:
    core = make_core()
    request = make_request(range(12), max_tokens=1)
    landing = core.arrive(request.block_hashes[:2])
    core.landings.reserve(landing)
    pulled = landing.block_ids()
    served(core, request)
    core.landings.commit(landing, 2)
    assert not set(landing.block_table) & set(pulled)
    assert landing.retired_blocks == list(pulled)
    core.landings.release(landing)
    assert_empty(core)
