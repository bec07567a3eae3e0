"""Ranks know at every step the tokens and pages that the scheduler means, by what orders tell them alone."""

import random
from collections.abc import Sequence as Seq

import pytest

from common.tokens import TokenArray
from engine.core import EngineCore
from engine.executor import ScheduledSequence
from engine.fake import FakeExecutor, FakeStep
from engine.scheduler import SchedulerLimits
from engine.vllm.order import OrderBook, SequenceOrder, StepOrder
from tests.builders import BLOCK_SIZE, Collector, expected_tokens, granted, make_request, run_until_idle
from tests.clock import ManualClock


class Ranks:
    """What a rank keeps of open sequences, by their keys."""

    def __init__(self) -> None:
        self.tokens: dict[str, TokenArray] = {}
        self.tables: dict[str, list[int]] = {}
        self.closed: set[str] = set()

    def take(self, order: StepOrder) -> None:
        for key in order.closed:
            del self.tokens[key], self.tables[key]
            self.closed.add(key)
        for each in order.sequences:
            if each.opened is not None:
                assert each.key not in self.tokens
                assert each.key not in self.closed, "a key is used twice"
                self.tokens[each.key] = each.opened.prompt_token_ids + each.opened.output_token_ids
                self.tables[each.key] = []
            self.tokens[each.key] = self.tokens[each.key] + each.new_output
            self.tables[each.key] += each.new_blocks

    def check(self, order: SequenceOrder, item: ScheduledSequence) -> None:
        sequence = item.sequence
        assert self.tokens[order.key] == sequence.token_ids
        num_tokens = sequence.num_computed + item.num_new_tokens
        table = self.tables[order.key]
        assert len(table) * BLOCK_SIZE >= num_tokens
        assert table == sequence.block_table[: len(table)].tolist()
        assert (order.num_computed, order.num_new_tokens) == (sequence.num_computed, item.num_new_tokens)
        assert (order.sample is None) == (item.num_samples == 0)


class OrderingExecutor(FakeExecutor):
    """The fake engine, told of every step by orders as well."""

    def __init__(self, *, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=512, max_steps_in_flight=1)
        self.verifies_drafts = False
        self.compiles_steps = False
        self.book, self.ranks = OrderBook(), Ranks()

    def launch(self, batch: Seq[ScheduledSequence]) -> FakeStep:
        order = self.book.order(batch)
        self.ranks.take(order)
        for each, item in zip(order.sequences, batch, strict=True):
            self.ranks.check(each, item)
        return super().launch(batch)


def core_of(executor: OrderingExecutor) -> EngineCore:
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=24, max_running=8, max_waiting=64)
    return EngineCore(executor, limits, ManualClock())


@pytest.mark.parametrize("seed", range(6))
def test_orders_tell_the_ranks_what_the_scheduler_means(seed: int) -> None:
    """Chunks, samples that share pages, cache hits, preemptions, resumed and cancelled requests, by chance."""
    chance = random.Random(seed)
    executor = OrderingExecutor(num_blocks=24)  # few: sequences are preempted
    core = core_of(executor)
    prefix = [chance.randrange(50) for _ in range(9)]
    sent = []
    for _ in range(20):
        prompt = prefix[: chance.randrange(10)] + [chance.randrange(50) for _ in range(chance.randrange(1, 30))]
        request = make_request(prompt, n=chance.choice([1, 1, 3]), max_tokens=chance.randrange(1, 20), ignore_eos=True)
        collector = Collector()
        group = granted(core.add(request, collector))
        sent.append((request, collector))
        for _ in range(chance.randrange(3)):
            for owner, event in core.step():
                owner.sink(event)
            core.wake()
        if chance.random() < 0.2:
            core.cancel(group)
            sent.pop()
    run_until_idle(core)
    assert core.scheduler.num_preemptions > 0
    for request, collector in sent:
        for sample in range(request.sampling.n):
            assert collector.token_ids(sample) == expected_tokens(request, sample=sample)
    executor.ranks.take(executor.book.order([]))
    assert not executor.ranks.tokens, "sequences that have ended stay open"


def test_after_a_failed_step_everything_is_told_again() -> None:
    executor = OrderingExecutor(num_blocks=24)
    core = core_of(executor)
    core.add(make_request([1, 2, 3]), Collector())
    core.step()
    executor.book.forget()
    executor.ranks.take(StepOrder(closed=(), sequences=()))
    run_until_idle(core)  # the checks of `launch` hold
    assert len(executor.ranks.closed) == 1


def test_the_step_that_tries_a_model_leaves_nothing_open() -> None:
    book, ranks = OrderBook(), Ranks()
    ranks.take(book.trial())
    assert len(ranks.tokens) == 1
    ranks.take(book.order([]))
    assert not ranks.tokens
