"""vLLM behind a worker's services: what is promised is kept, whatever comes first, and everything is given back."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import EngineFault, InvalidRequest, PromptTooLong, Refused
from common.pooling import Pooling
from common.timing import StepShape
from common.wire_names import FinishReason
from engine.events import EngineEvent, Failed, PrefillProgress, Started, Tokens
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.scheduler import SchedulerLimits
from engine.vllm.errands import BlocksStored, Closed, Staged, StepEnded, encode_report
from tests.builders import make_request
from tests.engine.vllm.fake_vllm import BLOCK_SIZE, FakeVllm, step, tokens_in


def request(num_tokens: int = 10, **changes: Any) -> EngineRequest:
    return make_request(range(1, num_tokens + 1), block_size=BLOCK_SIZE, **changes)


def ignore(_event: EngineEvent) -> None:
    pass


def granted(group: Group | Refused) -> Group:
    assert isinstance(group, Group), group
    return group


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    yield fake
    await fake.aclose()


@pytest.fixture
async def two_ranks() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(num_ranks=2)
    yield fake
    await fake.aclose()


async def test_an_answer_comes_with_its_start_its_tokens_and_its_end(vllm: FakeVllm) -> None:
    events: list[EngineEvent] = []
    granted(vllm.engine.add(request(max_tokens=3), events.append))
    await vllm.report(step(started=((1, 4),), shape=StepShape(num_prefill_tokens=6)))
    assert isinstance(events[0], Started)
    assert events[0].num_cached_tokens == 4
    assert vllm.engine.running_step is not None
    vllm.client.say(1, 7, 8)
    vllm.client.say(1, 9, end="length")
    await vllm.report(StepEnded(seconds=0.25))
    assert [token.token_id for token in tokens_in(events)] == [7, 8, 9]
    assert tokens_in(events)[-1].finish_reason is FinishReason.LENGTH
    assert vllm.engine.running_step is None
    assert [sample.seconds for report in vllm.reports for sample in report.samples] == [0.25]
    await vllm.close(1)
    assert vllm.is_empty


async def test_a_start_comes_before_the_tokens_also_when_the_loop_was_busy(vllm: FakeVllm) -> None:
    """Reports and outputs come by two ways, and the prefill's time is measured between them."""
    events: list[EngineEvent] = []
    granted(vllm.engine.add(request(max_tokens=1), events.append))
    await vllm.settle()
    vllm.client.say(1, 7, end="length")
    os.write(vllm.pipes.writing[0], encode_report(step(started=((1, 0),))))
    await vllm.settle()
    started, tokens = events
    assert isinstance(started, Started)
    assert isinstance(tokens, Tokens)
    assert tokens.prefill_s is not None


@pytest.mark.parametrize("is_first", ["the last token", "the confirmation"])
async def test_pages_are_free_once_vllm_has_confirmed_the_end(vllm: FakeVllm, is_first: str) -> None:
    granted(vllm.engine.add(request(max_tokens=1), ignore))
    if is_first == "the confirmation":
        await vllm.close(1)
        assert not vllm.is_empty
    vllm.client.say(1, 7, end="length")
    await vllm.settle()
    if is_first == "the last token":
        assert not vllm.is_empty
        await vllm.close(1)
    assert vllm.is_empty


async def test_a_reservation_is_granted_only_with_pages_and_keeps_them(vllm: FakeVllm) -> None:
    """17 tokens and the next one are 5 pages of 16: three reservations fit, and a request in line takes none away."""
    reserved = [granted(vllm.engine.reserve(request(17, salt=str(i)), ignore)) for i in range(3)]
    assert isinstance(vllm.engine.reserve(request(17), ignore), Refused)
    waiting = granted(vllm.engine.add(request(17), ignore))
    await vllm.settle()
    assert not vllm.client.specs
    vllm.engine.cancel(reserved[0])
    await vllm.settle()
    assert [spec.errand.num_loaded for spec in vllm.client.specs.values()] == [0]
    for group in (*reserved, waiting):
        vllm.engine.cancel(group)
    await vllm.settle()
    await vllm.close(1)
    assert vllm.is_empty


async def grow(vllm: FakeVllm, num_free_pages: int, **reported: Any) -> None:
    """Let two answers of 20 tokens grow to 24, beside a reservation of 3 pages, in a pool of 16."""
    for key in (1, 2):
        vllm.client.say(key, *range(101, 105))
    await vllm.settle()
    await vllm.report(step(num_free_pages=num_free_pages, **reported))


async def test_answers_that_outgrow_the_pages_leave_those_of_a_reservation(vllm: FakeVllm) -> None:
    """The latest one goes on later with its tokens so far; its own vLLM computes them again."""
    events: dict[str, list[EngineEvent]] = {"first": [], "second": []}
    for name, seen in events.items():
        granted(vllm.engine.add(request(20, salt=name, max_tokens=6), seen.append))
    reserved = granted(vllm.engine.reserve(request(10), ignore))
    await vllm.report(step(started=((1, 0), (2, 0)), computed=((1, 20), (2, 20)), num_free_pages=4))
    await grow(vllm, num_free_pages=3)
    assert not vllm.client.ended, "three pages are left"
    await vllm.report(step(num_free_pages=2))
    assert vllm.client.ended == [2]
    await vllm.report(step(num_free_pages=2))
    assert vllm.client.ended == [2], "pages are on their way"
    vllm.client.say(2, 999)
    vllm.engine.commit(reserved, 10)
    vllm.engine.start(reserved, [(50, False)])
    await vllm.settle()
    assert vllm.client.specs[3].errand.num_loaded == 10
    await vllm.close(2)
    assert isinstance(vllm.engine.reserve(request(3), ignore), Refused), "the one in line comes first"
    load = vllm.engine.load()
    assert (load.num_waiting, load.num_used_blocks, load.num_preemptions) == (1, 10, 1)
    vllm.client.say(1, 105, 106, end="length")
    await vllm.close(1)
    spec = vllm.client.specs[4]
    assert spec.token_ids.tolist() == [*range(1, 21), *range(101, 105)]
    assert (spec.num_prompt_tokens, spec.max_new_tokens, spec.errand.num_loaded) == (20, 2, 0)
    await vllm.report(step(started=((4, 20),)))
    vllm.client.say(4, 105, 106, end="length")
    await vllm.stage(3, 10)
    vllm.engine.cancel(reserved)
    await vllm.close(3, 4)
    for seen in events.values():
        assert [token.token_id for token in tokens_in(seen)] == [*range(101, 107)]
        assert sum(isinstance(event, Started) for event in seen) == 1
    assert vllm.is_empty


async def test_what_vllm_has_preempted_does_not_wait_before_a_reservation(vllm: FakeVllm) -> None:
    """In vLLM's line it would come first, and get the pages that others give back."""
    for name in ("first", "second"):
        granted(vllm.engine.add(request(20, salt=name, max_tokens=30), ignore))
    reserved = granted(vllm.engine.reserve(request(10), ignore))
    await vllm.report(step(started=((1, 0), (2, 0)), computed=((1, 20), (2, 20)), num_free_pages=4))
    await grow(vllm, num_free_pages=9, preempted=(2,))
    assert vllm.client.ended == [2]
    assert vllm.engine.load().num_preemptions == 1
    vllm.engine.cancel(reserved)
    await vllm.close(2)
    assert 3 in vllm.client.specs
    await vllm.report(step(started=((3, 0),)))
    await grow(vllm, num_free_pages=9, preempted=(3,))
    assert vllm.client.ended == [2], "nobody else awaits pages: vLLM goes on with it by itself"


async def test_samples_that_outgrow_all_pages_go_on_behind_a_reservation(vllm: FakeVllm) -> None:
    """Together they would never fit again."""
    samples = granted(vllm.engine.add(request(20, n=3, max_tokens=40), ignore))
    reserved = granted(vllm.engine.reserve(request(10), ignore))
    await vllm.report(step(started=((1, 0), (2, 20), (3, 20)), computed=((1, 20),)))
    for key in (1, 2, 3):
        vllm.client.say(key, *range(101, 121))
    await vllm.settle()
    await vllm.report(step(num_free_pages=2))
    assert sorted(vllm.client.ended) == [1, 2, 3]
    await vllm.close(1, 2, 3)
    assert sorted(vllm.client.specs) == [1, 2, 3]
    vllm.engine.cancel(reserved)
    await vllm.settle()
    assert sorted(vllm.client.specs) == [1, 2, 3, 4, 5, 6]
    assert {len(spec.token_ids) for spec in vllm.client.specs.values()} == {20, 40}
    vllm.engine.cancel(samples)
    await vllm.settle()
    await vllm.close(4, 5, 6)
    assert vllm.is_empty


async def test_a_refused_reservation_says_what_is_missing(vllm: FakeVllm) -> None:
    granted(vllm.engine.reserve(request(3, n=6), ignore))
    refused = vllm.engine.reserve(request(3, n=3), ignore)
    assert isinstance(refused, Refused)
    assert refused.reason == ("needs 3 pages, 1 staged blocks, 3 places; 10, 15 and 2 are free")


async def test_samples_have_pages_also_where_the_prompt_fills_its_last_one(vllm: FakeVllm) -> None:
    """Its last token is computed for each of them, in a page of their own."""
    granted(vllm.engine.add(request(8, n=2), ignore))
    assert vllm.engine.load().num_used_blocks == 5


async def test_a_sample_that_is_over_leaves_its_place_to_the_next_in_line(vllm: FakeVllm) -> None:
    granted(vllm.engine.add(request(3, n=6, max_tokens=20), ignore))
    granted(vllm.engine.add(request(3, n=3), ignore))
    await vllm.settle()
    assert len(vllm.client.specs) == 6
    vllm.client.say(1, 0, end="stop")
    await vllm.close(1)
    assert len(vllm.client.specs) == 9


async def test_a_change_of_the_pool_gives_no_places_that_vllm_does_not_have(vllm: FakeVllm) -> None:
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=64, max_running=99, max_waiting=1)
    vllm.engine.change_limits(limits)
    assert vllm.engine.load().num_free_slots == 8
    vllm.engine.change_limits(dataclasses.replace(limits, max_running=5))
    assert vllm.engine.load().num_free_slots == 5


async def test_a_filled_reservation_goes_on_behind_the_first_token(two_ranks: FakeVllm) -> None:
    vllm, events = two_ranks, []  # type: tuple[FakeVllm, list[EngineEvent]]
    group = granted(vllm.engine.reserve(request(10, max_tokens=3), events.append))
    assert len(group.leader.block_ids()) == 3
    vllm.engine.commit(group, 10)
    vllm.engine.start(group, [(50, False)])
    await vllm.settle()
    spec = vllm.client.specs[1]
    assert spec.token_ids.tolist() == [*range(1, 11), 50]
    assert (spec.errand.num_loaded, spec.max_new_tokens, spec.num_prompt_tokens) == (10, 2, 10)
    assert spec.errand.slots == group.leader.block_ids()
    await vllm.report(Staged(rank=1, key=1, num_tokens=10))
    assert vllm.kv.num_free == 13, "the other rank still reads them"
    await vllm.report(Staged(rank=0, key=1, num_tokens=10))
    assert vllm.kv.num_free == 16
    vllm.client.say(1, 51, 52, end="length")
    await vllm.settle()
    assert [(token.token_index, token.token_id) for token in tokens_in(events)] == [(1, 51), (2, 52)]
    assert not [event for event in events if isinstance(event, Started)], "the prompt was computed elsewhere"
    await vllm.close(1)
    assert vllm.is_empty


@pytest.mark.parametrize("is_first", ["token", "kv"])
async def test_first_tokens_come_when_the_kv_of_all_ranks_is_there(two_ranks: FakeVllm, is_first: str) -> None:
    """Or a puller would take a manifest for blocks that are not whole."""
    vllm, events = two_ranks, []  # type: tuple[FakeVllm, list[EngineEvent]]
    group = granted(vllm.engine.add_prefill_only(request(10), events.append))
    await vllm.report(step(started=((1, 0),)), Staged(rank=0, key=1, num_tokens=8))
    assert len(events) == 1, "the other rank has not copied a block"
    await vllm.report(Staged(rank=1, key=1, num_tokens=8))
    assert events[-1] == PrefillProgress(num_computed_tokens=8, block_table=group.leader.block_ids())
    if is_first == "token":
        vllm.client.say(1, 7, end="length")
        await vllm.settle()
        assert not tokens_in(events)
    await vllm.stage(1, 10)
    if is_first == "kv":
        assert not tokens_in(events)
        vllm.client.say(1, 7, end="length")
        await vllm.settle()
    assert [token.token_id for token in tokens_in(events)] == [7]
    await vllm.close(1)
    load = vllm.engine.load()
    assert (load.num_held, load.num_used_blocks, vllm.kv.num_free) == (1, 0, 13), "vLLM's pages are its own again"
    vllm.engine.cancel(group)
    assert vllm.is_empty


@pytest.mark.parametrize("moment", ["in line", "entering", "staged", "decoding", "over"])
@pytest.mark.parametrize("kind", ["add", "add_prefill_only"])
async def test_a_request_cancelled_at_any_moment_gives_everything_back(vllm: FakeVllm, moment: str, kind: str) -> None:
    ahead = granted(vllm.engine.add(request(55, salt="ahead"), ignore)) if moment == "in line" else None
    group = granted(getattr(vllm.engine, kind)(request(10, n=2), ignore))
    keys = [] if ahead else [1, 2]
    if moment not in ("entering", "in line"):
        await vllm.settle()
    if moment in ("staged", "over") and kind == "add_prefill_only":
        await vllm.stage(1, 10)
    if moment in ("decoding", "over"):
        for key in keys:
            vllm.client.say(key, 7, end="length" if moment == "over" else "")
        await vllm.settle()
    vllm.engine.cancel(group)
    vllm.engine.cancel(group)
    if ahead:
        vllm.engine.cancel(ahead)
    await vllm.settle()
    assert vllm.kv.num_free == 16 or kind == "add_prefill_only", "vLLM may still write into the slots"
    await vllm.close(*vllm.client.specs)
    assert vllm.is_empty


async def test_a_request_cancelled_twice_is_still_ended_in_vllm(vllm: FakeVllm) -> None:
    """Or it would go on there with its pages: a failure and the end of its call both cancel it."""
    group = granted(vllm.engine.add_prefill_only(request(10), ignore))
    await vllm.settle()
    vllm.client.may_end.clear()
    for _ in range(2):
        vllm.engine.cancel(group)
        await vllm.settle()
    vllm.client.may_end.set()
    await vllm.settle()
    assert vllm.client.ended == [1]
    await vllm.close(1)
    assert vllm.is_empty


async def test_a_line_that_is_full_refuses_and_the_first_in_line_enters_first(vllm: FakeVllm) -> None:
    groups = [granted(vllm.engine.add(request(30, salt=str(i)), ignore)) for i in range(4)]
    assert isinstance(vllm.engine.add(request(30), ignore), Refused)
    await vllm.settle()
    assert sorted(vllm.client.specs) == [1, 2]
    assert vllm.engine.load().num_waiting == 2
    vllm.engine.cancel(groups[0])
    await vllm.settle()
    assert vllm.client.ended == [1]
    await vllm.close(1)
    assert vllm.client.specs[3].salt == groups[2].request.hash_root.hex()


async def test_a_request_that_vllm_fails_ends_with_an_error_and_others_go_on(vllm: FakeVllm) -> None:
    failed: list[EngineEvent] = []
    other: list[EngineEvent] = []
    granted(vllm.engine.add(request(10), failed.append))
    granted(vllm.engine.add(request(10, salt="other"), other.append))
    await vllm.settle()
    vllm.client.fail(1)
    vllm.client.say(2, 7)
    await vllm.settle()
    assert isinstance(failed[-1], Failed)
    assert isinstance(failed[-1].error, EngineFault)
    assert [token.token_id for token in tokens_in(other)] == [7]
    assert not vllm.faults


async def test_a_request_that_vllm_does_not_take_ends_with_its_reason_and_holds_nothing(vllm: FakeVllm) -> None:
    events: list[EngineEvent] = []
    granted(vllm.engine.add_prefill_only(request(10), events.append))
    await vllm.settle()
    vllm.client.refuse(1)
    await vllm.settle()
    assert isinstance(events[-1], Failed)
    assert "too long for it" in str(events[-1].error)
    assert vllm.is_empty


async def test_a_vllm_that_is_gone_is_a_fault_of_the_worker(vllm: FakeVllm) -> None:
    granted(vllm.engine.add(request(10), ignore))
    await vllm.settle()
    vllm.client.is_broken = True
    vllm.client.fail(1)
    await vllm.settle()
    assert len(vllm.faults) == 1


async def test_a_process_of_vllm_that_ends_is_one_fault_of_the_worker(two_ranks: FakeVllm) -> None:
    two_ranks.pipes.seal()
    await two_ranks.settle()
    assert [str(fault) for fault in two_ranks.faults] == ["a process of vLLM has ended"]


async def test_a_report_that_does_not_fit_the_books_is_a_fault_of_the_worker(vllm: FakeVllm) -> None:
    """Or those behind it would be lost, and pages with them."""
    await vllm.report(Staged(rank=0, key=7, num_tokens=4))
    assert [type(fault) for fault in vllm.faults] == [KeyError]


async def test_reports_longer_than_a_pipe_come_whole(vllm: FakeVllm) -> None:
    """vLLM's scheduler waits until they are read."""
    blocks = BlocksStored(hashes=(b"a",) * 25_000, parent=b"b", salt="", token_ids=(50_000,) * 100_000)
    long = dataclasses.replace(step(shape=StepShape(num_prefill_tokens=100_000)), changes=(blocks,))
    data = memoryview(encode_report(long))
    assert len(data) > 1 << 18

    def write() -> None:
        sent = 0
        while sent < len(data):
            sent += os.write(vllm.pipes.writing[0], data[sent:])

    await asyncio.to_thread(write)
    await vllm.settle()
    assert vllm.engine.load().num_computed_tokens == 100_000


async def test_what_vllm_cannot_do_is_refused_by_name(vllm: FakeVllm) -> None:
    with pytest.raises(InvalidRequest, match="beam search"):
        vllm.engine.add(request(n=2, use_beam_search=True), ignore)
    with pytest.raises(InvalidRequest, match="embeddings"):
        vllm.engine.add(dataclasses.replace(request(), pooling=Pooling.MEAN), ignore)
    with pytest.raises(PromptTooLong, match="takes 63"):
        vllm.engine.add(request(64), ignore)
    with pytest.raises(PromptTooLong, match="needs 25 KV blocks; this worker has 16"):
        vllm.engine.add(request(32, n=9), ignore)
    with pytest.raises(InvalidRequest, match="9 samples") as caught:
        vllm.engine.reserve(request(3, n=9), ignore)
    assert caught.value.field == "n"
    assert vllm.is_empty


async def test_a_stop_token_ends_a_sample_as_in_every_engine(vllm: FakeVllm) -> None:
    events: list[EngineEvent] = []
    granted(vllm.engine.add(request(10, stop_token_ids=frozenset({5})), events.append))
    await vllm.settle()
    assert vllm.client.specs[1].stop_token_ids == {0, 5}
    vllm.client.say(1, 7, 5, end="stop")
    await vllm.settle()
    assert [token.finish_reason for token in tokens_in(events)] == [None, FinishReason.STOP]


async def test_ranks_confirm_before_slots_are_given_out_again(two_ranks: FakeVllm) -> None:
    vllm = two_ranks
    group = granted(vllm.engine.add_prefill_only(request(10), ignore))
    await vllm.settle()
    vllm.engine.cancel(group)
    await vllm.report(Closed(rank=0, keys=(1,)))
    assert vllm.kv.num_free == 13
    await vllm.report(Closed(rank=1, keys=(1,)))
    assert vllm.is_empty
