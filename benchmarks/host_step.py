"""One arm of `benchmarks.host_time`: a host's work for the steps of 64 sequences, as JSON.

    python benchmarks/host_step.py MAX_STEPS_IN_FLIGHT

It also runs on other checkouts, so it imports nothing of the benchmarks.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.block_hash import hash_blocks, hash_root
from common.clock import SystemClock
from common.errors import Refused
from common.fake_tokenizer import byte_tokenizer
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import EngineEvent, StepReport, Tokens
from engine.executor import Sampled, ScheduledSequence, StepResult
from engine.fake import fake_shape
from engine.scheduler import SchedulerLimits
from engine.sequence import EngineRequest
from worker.output import OutputStreams

NUM_SEQUENCES = 64
CONTEXTS = (128, 2048, 8192)
BLOCK_SIZE = 16
WARM_STEPS, STEPS = 100, 400
PARTS = ("plan", "take", "report", "text")


class _NullStore:
    """Pages without bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.shape = fake_shape(BLOCK_SIZE)
        self.num_blocks = num_blocks


@dataclass(slots=True)
class _Done:
    answers: list[StepResult]

    def results(self) -> list[StepResult]:
        """Return what was known beforehand."""
        return self.answers


class _NullExecutor:
    """Answers every step with letters; counts the time that it takes itself. Has the protocol's old method, too."""

    def __init__(self, num_blocks: int, max_steps_in_flight: int) -> None:
        self.kv: Any = _NullStore(num_blocks)
        self.max_model_len = 1 << 20
        self.vocab_size = 256
        self.hidden_size = 0
        self.eos_token_ids = frozenset[int]()
        self.model_name = "null"
        self.max_steps_in_flight = max_steps_in_flight
        self.verifies_drafts = False
        self.exact_resume = True
        self.floors: Any = None
        self.inside_ns = 0
        self._num_steps = 0

    def execute(self, batch: Seq[ScheduledSequence]) -> list[StepResult]:
        """Return a token for each sequence."""
        begin_ns = time.perf_counter_ns()
        self._num_steps += 1
        token_id = 97 + self._num_steps % 26
        results = [
            StepResult(sampled=[Sampled(token_id=token_id)] * item.num_samples, prompt_logprobs=[]) for item in batch
        ]
        self.inside_ns += time.perf_counter_ns() - begin_ns
        return results

    def launch(self, batch: Seq[ScheduledSequence]) -> _Done:
        """Return a step that is done."""
        return _Done(self.execute(batch))


class _Bench:
    """A core with 64 running sequences."""

    def __init__(self, context: int, max_steps_in_flight: int) -> None:
        blocks_each = (context + WARM_STEPS + STEPS) // BLOCK_SIZE + 5
        self._executor = _NullExecutor(NUM_SEQUENCES * blocks_each + 64, max_steps_in_flight)
        limits = SchedulerLimits(
            block_size=BLOCK_SIZE,
            max_step_tokens=NUM_SEQUENCES * (context + BLOCK_SIZE),
            max_running=NUM_SEQUENCES,
            max_waiting=NUM_SEQUENCES,
        )
        self.core = EngineCore(self._executor, limits, SystemClock())
        tokenizer = byte_tokenizer()
        self._inbox: list[tuple[OutputStreams, EngineEvent]] = []
        root = hash_root(model_fingerprint="null")
        for i in range(NUM_SEQUENCES):
            prompt = [i, *range(100, 99 + context + i % BLOCK_SIZE)]
            request = EngineRequest(
                request_id=RequestId(f"req-{i}"),
                prompt_token_ids=as_tokens(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + STEPS + 32, ignore_eos=True),
                hash_root=root,
                block_hashes=hash_blocks(prompt, root=root, block_size=BLOCK_SIZE),
            )
            streams = OutputStreams(request, tokenizer)
            group = self.core.add(request, partial(self._deliver, streams))
            if isinstance(group, Refused):
                raise RuntimeError(group.reason)

    def _deliver(self, streams: OutputStreams, event: EngineEvent) -> None:
        self._inbox.append((streams, event))

    def step(self) -> dict[str, float]:
        """Run one step; returns its parts in microseconds."""
        inside_ns = self._executor.inside_ns
        stamps = [time.perf_counter_ns()]
        plan, emitted = self.core.begin_step()
        stamps.append(time.perf_counter_ns())
        emitted += self.core.finish_step(plan)
        stamps.append(time.perf_counter_ns())
        StepReport(kv_events=self.core.pool.drain_events(), load=self.core.load())
        stamps.append(time.perf_counter_ns())
        for group, event in emitted:
            group.sink(event)
        for streams, event in self._inbox:
            if isinstance(event, Tokens):
                streams.take(event.tokens)
        self._inbox.clear()
        stamps.append(time.perf_counter_ns())
        spent_ns = [b - a for a, b in itertools.pairwise(stamps)]
        spent_ns[1] -= self._executor.inside_ns - inside_ns
        return {part: ns / 1000 for part, ns in zip(PARTS, spent_ns, strict=True)}


def _measure(max_steps_in_flight: int) -> dict[str, dict[str, float]]:
    """Return the medians of every part for every context."""
    found: dict[str, dict[str, float]] = {}
    for context in CONTEXTS:
        bench = _Bench(context, max_steps_in_flight)
        for _ in range(WARM_STEPS):
            bench.step()
        samples = [bench.step() for _ in range(STEPS)]
        assert bench.core.load().num_running == NUM_SEQUENCES, "all sequences must decode to the end"
        found[str(context)] = {part: statistics.median(s[part] for s in samples) for part in PARTS}
    return found


if __name__ == "__main__":
    json.dump(_measure(int(sys.argv[1])), sys.stdout)
