"""EngineCore as a state machine: all calls of a worker, in any order, in turn and overlapped.

The fake engine computes a launched step as late as possible and answers with a hash of the pages that it finds. So a
page that gets a new owner too early, or is published with wrong content, gives a wrong token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.block_hash import hash_blocks
from common.errors import PromptTooLong, Refused
from common.ids import BlockHash, BlockId
from common.pooling import Pooling
from engine.events import Embedded, Tokens
from engine.fake_model import token_kv
from engine.group import Group
from engine.landing import Landing
from engine.request import EngineRequest, Retention
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceState
from tests.builders import (
    BLOCK_SIZE,
    Collector,
    assert_empty,
    expected_embedding,
    expected_tokens,
    make_core,
    make_request,
)
from tests.engine.beam_oracle import expected_beams
from tests.engine.drafting import GuessingDrafter, eager
from tests.engine.overlap import Spy, step

STOP_TOKEN = ord("e")  # one of the fake's letters


@dataclass(eq=False)
class Work:
    """A request and the known part of its answer."""

    group: Group
    collector: Collector
    kind: str
    """"add", "prefill", "embed" or "reserve"."""
    is_ended: bool = False
    """Whether it was cancelled."""
    ended_samples: set[int] = field(default_factory=set)
    first_index: int = 0
    """Index of the first token that this core generates."""
    _answers: dict[int, list[int]] = field(default_factory=dict)

    def answer(self, sample: int) -> list[int]:
        """Return the correct whole answer."""
        if sample not in self._answers:
            request = self.group.request
            if request.sampling.has_beams:
                self._answers = dict(enumerate(expected_beams(request)))
                return self._answers[sample]
            tokens = expected_tokens(request, sample=sample)
            stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
            self._answers[sample] = tokens[: stops[0] + 1] if stops else tokens
        return self._answers[sample]

    def told(self, sample: int) -> list[int]:
        """Return the received tokens, which must be consecutive from the first one on."""
        outputs = [o for o in self.collector.outputs if o.sample_index == sample]
        assert [o.token_index for o in outputs] == list(range(self.first_index, self.first_index + len(outputs)))
        return [o.token_id for o in outputs]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({STOP_TOKEN})]),
        "num_prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self.tokens_of: dict[BlockHash, Sequence[int]] = {}
        self.landings: list[tuple[Landing, EngineRequest]] = []
        self.pins: list[tuple[BlockId, ...]] = []
        self.answers: dict[tuple[int, int], list[int]] = {}

    @initialize(
        max_steps_in_flight=st.sampled_from([1, 2, 2]),
        num_blocks=st.integers(5, 12),
        max_step_tokens=st.integers(3, 16),
        num_admitted=st.integers(0, 3),
        share_of_right_drafts=st.sampled_from([None, 0.0, 0.8]),
        num_branches=st.sampled_from([0, 2]),
    )
    def start(
        self,
        max_steps_in_flight: int,
        num_blocks: int,
        max_step_tokens: int,
        num_admitted: int,
        share_of_right_drafts: float | None,
        num_branches: int,
    ) -> None:
        self.core = make_core(
            num_blocks=num_blocks,
            max_step_tokens=max_step_tokens,
            max_running=6,
            max_steps_in_flight=max_steps_in_flight,
            speculator=None
            if share_of_right_drafts is None
            else eager(GuessingDrafter(self.answer_of, rate=share_of_right_drafts, num_branches=num_branches)),
        )
        self.core.scheduler.pages.num_admitted = num_admitted
        self.spy = Spy(self.core)
        publish = self.core.scheduler.pages.publish

        def note_and_publish(sequence: EngineSequence) -> None:
            self.note_blocks(sequence)  # a beam may die in the step that fills its block
            publish(sequence)

        self.core.scheduler.pages.publish = note_and_publish  # type: ignore[method-assign]

    # ── calls of a worker ──────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        are_beams=st.booleans(),
        kind=st.sampled_from(["add", "add", "prefill", "reserve"]),
        retention=st.sampled_from(Retention),
    )
    def enter(
        self, prompt: list[int], sampling: dict[str, Any], n: int, are_beams: bool, kind: str, retention: Retention
    ) -> None:
        if are_beams and n > 1:
            sampling = sampling | {"use_beam_search": True, "num_prompt_logprobs": None, "presence_penalty": 0.0}
        request = replace(make_request(prompt, n=n, ignore_eos=True, **sampling), retention=retention)
        enter = {"add": self.core.add, "prefill": self.core.add_prefill_only, "reserve": self.core.reserve}[kind]
        collector = Collector()
        try:
            group = enter(request, collector)
        except PromptTooLong:
            return
        if not isinstance(group, Refused):
            has_first = kind == "reserve" and not request.sampling.has_beams
            self.works.append(Work(group, collector, kind, first_index=int(has_first)))
            self.core.wake()

    @rule(prompt=PROMPTS, pooling=st.sampled_from(Pooling))
    def embed(self, prompt: list[int], pooling: Pooling) -> None:
        request, collector = replace(make_request(prompt), pooling=pooling), Collector()
        try:
            group = self.core.add(request, collector)
        except PromptTooLong:
            return
        if not isinstance(group, Refused):
            self.works.append(Work(group, collector, "embed"))
            self.core.wake()

    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        begun = [w for w in self.works if w.kind == "add" and w.group.beams is None]
        works = [w for w in begun if 0 < len(w.told(0)) < len(w.answer(0))]
        if not works:
            return
        other = data.draw(st.sampled_from(works))
        told = other.told(0)
        before = other.group.request
        params = {name: getattr(before.sampling, name) for name in ("max_tokens", "temperature", "seed")}
        request = make_request(
            before.prompt_token_ids,
            output=told,
            ignore_eos=True,
            stop_token_ids=before.sampling.stop_token_ids,
            **params,
        )
        collector = Collector()
        group = self.core.add(request, collector)
        if not isinstance(group, Refused):
            self.works.append(Work(group, collector, "add", first_index=len(told)))
            self.core.wake()

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.core.has_work:
                step(self.core)

    @rule(data=st.data())
    def transfer_and_start(self, data: st.DataObject) -> None:
        if not self.reserved():
            return
        work = data.draw(st.sampled_from(self.reserved()))
        leader = work.group.leader
        size = BLOCK_SIZE
        self.fill(work)
        whole = data.draw(st.booleans())
        if not whole:  # a verified part, which is published; the rest comes later
            self.core.commit(work.group, max(leader.num_computed, leader.num_tokens // size * size))
            return
        self.core.commit(work.group, leader.num_tokens)
        request = work.group.request
        samples = range(0 if request.sampling.has_beams else request.sampling.n)
        first = [work.answer(sample)[0] for sample in samples]
        is_over = [len(work.answer(sample)) == 1 for sample in samples]
        self.core.start(work.group, list(zip(first, is_over, strict=True)))
        self.core.wake()

    @rule(prompt=PROMPTS, sampling=SAMPLING, retention=st.sampled_from(Retention))
    def begin_to_pull(self, prompt: list[int], sampling: dict[str, Any], retention: Retention) -> None:
        request = make_request(prompt, ignore_eos=True, **sampling | {"num_prompt_logprobs": None})
        request = replace(request, retention=retention)
        landing = self.core.arrive(request.block_hashes[: (len(prompt) - 1) // BLOCK_SIZE])
        self.core.landings.reserve(landing)
        self.landings.append((landing, request))

    @rule(data=st.data(), kind=st.sampled_from(["add", "prefill", "cancel"]))
    def end_a_pull(self, data: st.DataObject, kind: str) -> None:
        if not self.landings:
            return
        landing, request = data.draw(st.sampled_from(self.landings))
        self.landings.remove((landing, request))
        if landing.block_table:
            num_blocks = data.draw(st.integers(landing.num_cached_blocks, len(landing.hashes)))
            self.write(landing.block_ids(), range(landing.num_cached_blocks, num_blocks), request.prompt_token_ids)
            for i in range(num_blocks):
                self.tokens_of[landing.hashes[i]] = request.prompt_token_ids[: (i + 1) * BLOCK_SIZE]
            self.core.landings.commit(landing, num_blocks)
        if kind != "cancel":
            collector = Collector()
            try:
                enter = self.core.add if kind == "add" else self.core.add_prefill_only
                group = enter(request, collector, landing)
            except PromptTooLong:
                pass
            else:
                if not isinstance(group, Refused):
                    self.works.append(Work(group, collector, kind))
        self.core.landings.release(landing)
        self.core.wake()

    @rule(prompt=PROMPTS)
    def pin(self, prompt: list[int]) -> None:
        self.pins.append(self.core.landings.pin(make_request(prompt).block_hashes))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            pin = data.draw(st.sampled_from(self.pins))
            self.pins.remove(pin)
            self.core.landings.unpin(pin)
            self.core.wake()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if not self.alive():
            return
        work = data.draw(st.sampled_from(self.alive()))
        self.core.cancel(work.group)
        work.is_ended = True
        self.core.wake()

    @rule(data=st.data())
    def finish_sample(self, data: st.DataObject) -> None:
        forked = [work for work in self.alive() if len(work.group.sequences) > 1 and work.group.beams is None]
        if not forked:
            return
        work = data.draw(st.sampled_from(forked))
        sample = data.draw(st.integers(0, work.group.request.sampling.n - 1))
        self.core.finish_sample(work.group, sample)
        work.ended_samples.add(sample)
        self.core.wake()

    @rule(max_step_tokens=st.integers(3, 16), max_running=st.integers(1, 6))
    def change_limits(self, max_step_tokens: int, max_running: int) -> None:
        limits = self.core.scheduler.limits
        self.core.scheduler.change_limits(
            replace(limits, max_step_tokens=max_step_tokens, max_running=min(max_running, max_step_tokens))
        )
        self.core.wake()

    @rule(fault=st.sampled_from([None, None, None, "launch", "results"]))
    def break_next_step(self, fault: str | None) -> None:
        next_step = len(self.spy.batches)
        self.spy.fail_launch_of = next_step if fault == "launch" else None
        self.spy.fail_results_of.discard(next_step)
        if fault == "results":
            self.spy.fail_results_of.add(next_step)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def tokens_are_those_of_the_oracle_each_once_and_in_order(self) -> None:
        for work in self.works:
            for sample in range(work.group.request.sampling.n):
                told = work.told(sample)
                if told:
                    whole = self.whole_answer(work, sample)
                    assert told == whole[: len(told)]

    @invariant()
    def pages_are_held_by_sequences_and_steps_in_flight_only(self) -> None:
        pool = self.core.pool
        held: Counter[int] = Counter()
        for work in self.works:
            for sequence in work.group.sequences:
                held.update(sequence.block_table)
                held.update(sequence.retired_blocks)
                held.update(sequence.landed_blocks)
        for landing, _request in self.landings:
            held.update(landing.block_table)
            held.update(landing.retired_blocks)
        for pin in self.pins:
            held.update(pin)
        for block_id in range(pool.num_blocks):
            extra = pool.ref_count(block_id) - held[block_id]  # the source of a copy is held by its step
            assert extra == 0 or (extra > 0 and self.core.num_steps_in_flight), (block_id, extra)

    @invariant()
    def ended_sequences_hold_pages_only_while_a_step_with_them_is_in_flight(self) -> None:
        for work in self.works:
            for sequence in work.group.sequences:
                if sequence.state is SequenceState.FINISHED:
                    assert bool(sequence.num_in_flight) >= bool(sequence.block_table)
                assert sequence.num_in_flight <= self.core.num_steps_in_flight

    @invariant()
    def published_pages_hold_the_kv_of_their_tokens(self) -> None:
        for sequence in (s for work in self.works for s in work.group.sequences):
            self.note_blocks(sequence)
        for block_hash in self.core.pool.snapshot().stored:
            (block_id,) = self.core.pool.match_prefix([block_hash])
            tokens = self.tokens_of[block_hash]
            found = np.frombuffer(self.core.executor.kv.read_blocks([block_id]), dtype="<u8")
            start = len(tokens) - BLOCK_SIZE
            assert found.tolist() == [token_kv(tokens[p], p) for p in range(start, len(tokens))]

    @invariant()
    def load_counts_what_is_there(self) -> None:
        load, scheduler = self.core.load(), self.core.scheduler
        running = scheduler.running
        decoding = [s for s in running if s.will_decode and s.num_tokens - s.num_ready == 1]
        starts = [(s, s.num_ready) for s in running if s not in decoding]
        starts += [(s, s.num_expected_cached_tokens) for s in scheduler.waiting]
        assert load.num_decoding == len(decoding)
        assert load.num_pending_prefill_tokens == sum(s.num_tokens - start for s, start in starts)
        pairs = sum(position + 1 for s, start in starts for position in range(start, s.num_tokens))
        assert load.num_pending_prefill_pairs == pairs
        context = sum(s.num_tokens for s in (*running, *scheduler.waiting) if s.will_decode)
        context += sum(s.num_samples * s.num_tokens for s in scheduler.reserved)
        assert load.num_context_tokens == context

    @invariant()
    def expected_prefixes_are_what_a_walk_would_find(self) -> None:
        pool = self.core.pool
        for sequence in (s for work in self.works for s in work.group.sequences):
            reusable = sequence.block_hashes[: sequence.num_reusable_blocks]
            assert pool.num_matching(sequence.block_hashes, len(reusable)) == len(pool.match_prefix(reusable))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.spy.fail_launch_of = None
        self.spy.fail_results_of.discard(len(self.spy.batches))
        for work in self.works:
            if work.kind == "reserve" and work.group.leader.state is SequenceState.RESERVED:
                work.is_ended = True
                self.core.cancel(work.group)
        for landing, _request in self.landings:
            self.core.landings.release(landing)
        for pin in self.pins:
            self.core.landings.unpin(pin)
        for _ in range(len(self.works) + 1):  # in each round at least one more request gets its pages
            self.core.wake()
            self.run_until_idle()
            for work in self.works:
                if work.group.leader.state is SequenceState.HELD:
                    self.core.cancel(work.group)
        assert_empty(self.core)
        for work in self.works:
            if work.is_ended or work.collector.failure is not None:
                continue
            request = work.group.request
            if request.pooling is not None:
                (embedded,) = [event for event in work.collector.events if isinstance(event, Embedded)]
                expected = expected_embedding(request.prompt_token_ids, request.pooling)
                assert embedded.vector.tolist() == expected.tolist()
                continue
            for sample in range(work.group.request.sampling.n):
                if sample in work.ended_samples:
                    continue
                whole = self.whole_answer(work, sample)
                num_first = 0 if work.group.request.sampling.has_beams else 1
                assert work.told(sample) == (whole[:num_first] if work.kind == "prefill" else whole)
            if work.group.request.sampling.num_prompt_logprobs is not None and work.kind != "reserve":
                told = [len(e.prompt_logprobs) for e in work.collector.events if isinstance(e, Tokens)]
                has_output = bool(work.group.request.output_token_ids)
                assert sum(told) == (0 if has_output else len(work.group.request.prompt_token_ids) - 1)

    # ── helpers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_blocks(self, sequence: EngineSequence) -> None:
        """Remember the tokens of each of its full blocks."""
        hashes = hash_blocks(sequence.token_ids, root=sequence.request.hash_root, block_size=BLOCK_SIZE)
        for i, block_hash in enumerate(hashes):
            self.tokens_of[block_hash] = tuple(sequence.token_ids[: (i + 1) * BLOCK_SIZE])

    def run_until_idle(self) -> None:
        """Step like the engine thread: a stalled core waits for a command."""
        for _ in range(1000):
            if not self.core.has_work:
                return
            step(self.core)
        raise AssertionError("still busy after 1000 steps")

    def answer_of(self, sequence: EngineSequence) -> list[int]:
        """Return the whole answer of a sequence, which starts with the tokens that its request resumes."""
        request, key = sequence.request, (id(sequence.request), sequence.sample_index)
        if key not in self.answers:
            self.answers[key] = [*request.output_token_ids, *expected_tokens(request, sample=sequence.sample_index)]
        return self.answers[key]

    def alive(self) -> list[Work]:
        return [work for work in self.works if not work.group.is_over]

    def reserved(self) -> list[Work]:
        return [work for work in self.works if work.group.leader.state is SequenceState.RESERVED]

    def whole_answer(self, work: Work, sample: int) -> list[int]:
        """Return the part of the answer that this core generates."""
        request: EngineRequest = work.group.request
        return work.answer(sample)[0 if request.output_token_ids else work.first_index :]

    def fill(self, work: Work) -> None:
        """Write a reservation's pages, as a transfer does at any time."""
        leader = work.group.leader
        indexes = range(leader.num_computed // BLOCK_SIZE, len(leader.block_table))
        self.write(leader.block_ids(), indexes, leader.token_ids)

    def write(self, block_table: Sequence[BlockId], indexes: range, token_ids: Sequence[int]) -> None:
        """Write the correct KV of these blocks of a sequence into its pages."""
        for i in indexes:
            positions = range(i * BLOCK_SIZE, min((i + 1) * BLOCK_SIZE, len(token_ids)))
            page = np.zeros(BLOCK_SIZE, dtype="<u8")
            page[: len(positions)] = [token_kv(token_ids[p], p) for p in positions]
            self.core.executor.kv.write_blocks(block_table[i : i + 1], memoryview(page.tobytes()))


CoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCore = CoreMachine.TestCase
