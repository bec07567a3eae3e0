"""Random calls of a worker to an engine core, in any order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from common.block_hash import hash_blocks
from common.errors import InvalidRequest, PromptTooLong, Refused
from common.ids import BlockHash, BlockId
from common.pooling import Pooling
from engine.fake_model import token_kv
from engine.fake_pages import FakeWindow
from engine.request import EngineRequest, Retention
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceState
from engine.steps.landing import Landing, Pinned
from engine.window_ids import WindowIds
from tests.builders import BLOCK_SIZE, Collector, expected_tokens, make_core, make_request
from tests.engine.core_work import PROMPTS, SAMPLING, Work
from tests.engine.drafting import GuessingDrafter, eager
from tests.engine.overlap import Spy, step

NO_BLOCK = BlockId(-1)


class CoreCalls(RuleBasedStateMachine):
    """A core over the fake engine, and all calls of a worker as rules."""

    window: FakeWindow | None = None

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self.tokens_of: dict[BlockHash, Sequence[int]] = {}
        self.landings: list[tuple[Landing, EngineRequest]] = []
        self.pins: list[Pinned] = []
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
            num_blocks=num_blocks if self.window is None else 4 * num_blocks,
            max_step_tokens=max_step_tokens,
            max_running=6,
            max_steps_in_flight=max_steps_in_flight,
            window=self.window,
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
            sampling |= {"structured_outputs": "", "ignore_eos": True}
        request = replace(make_request(prompt, n=n, **sampling), retention=retention)
        enter = {"add": self.core.add, "prefill": self.core.add_prefill_only, "reserve": self.core.reserve}[kind]
        collector = Collector()
        try:
            group = enter(request, collector)
        except (InvalidRequest, PromptTooLong):
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
        names = ("max_tokens", "temperature", "seed", "stop_token_ids", "structured_outputs", "ignore_eos")
        params = {name: getattr(before.sampling, name) for name in names}
        request = make_request(before.prompt_token_ids, output=told, **params)
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
        request = make_request(prompt, **sampling | {"num_prompt_logprobs": None})
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
            pulled = range(landing.num_cached_blocks, num_blocks)
            self.write(landing.block_ids(), pulled, request.prompt_token_ids)
            if num_blocks == len(landing.hashes):
                self.write_windows(landing.windows, pulled, request.prompt_token_ids)
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

    @rule()
    def forget(self) -> None:
        pool = self.core.pool
        forgotten = self.core.forget(make_request([1]).hash_root)
        held = [pool.ref_count(pool.block_of(block_hash)) for block_hash in pool.snapshot().stored]
        assert all(held), "all requests have this root"
        assert forgotten.is_in_use or not held

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

    # ── helpers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_blocks(self, sequence: EngineSequence) -> None:
        """Remember the tokens of each of its full blocks."""
        hashes = hash_blocks(sequence.token_ids, root=sequence.request.hash_root, block_size=BLOCK_SIZE)
        for i, block_hash in enumerate(hashes):
            self.tokens_of[block_hash] = tuple(sequence.token_ids[: (i + 1) * BLOCK_SIZE])

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

    def fill(self, work: Work) -> None:
        """Write a reservation's pages, as a transfer does at any time."""
        leader = work.group.leader
        indexes = range(leader.num_computed // BLOCK_SIZE, len(leader.block_table))
        self.write(leader.block_ids(), indexes, leader.token_ids)
        self.write_windows(leader.awaited_windows, indexes, leader.token_ids)

    def write_windows(self, windows: WindowIds, indexes: range, token_ids: Sequence[int]) -> None:
        """Write the correct KV of these blocks of a sequence into its window pages, where it has some."""
        table = [NO_BLOCK] * windows.first_block + [*windows.ids]
        self.write(table, range(max(indexes.start, windows.first_block), min(indexes.stop, len(table))), token_ids)

    def write(self, block_table: Sequence[BlockId], indexes: range, token_ids: Sequence[int]) -> None:
        """Write the correct KV of these blocks of a sequence into its pages."""
        for i in indexes:
            positions = range(i * BLOCK_SIZE, min((i + 1) * BLOCK_SIZE, len(token_ids)))
            page = np.zeros(BLOCK_SIZE, dtype="<u8")
            page[: len(positions)] = [token_kv(token_ids[p], p) for p in positions]
            self.core.executor.kv.write_blocks(block_table[i : i + 1], memoryview(page.tobytes()))
