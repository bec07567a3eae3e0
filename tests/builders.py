"""Builders that tests share."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from common.block_hash import hash_blocks, hash_root
from common.clock import Clock
from common.errors import Refused
from common.fake_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from common.ids import RequestId
from common.pooling import Pooling
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import EngineEvent, Failed, TokenOutput, Tokens
from engine.executor import Executor
from engine.fake import FakeExecutor
from engine.fake_model import U64, choose, context_state, hidden_state, token_kv
from engine.fake_pages import FakeWindow
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.scheduler import SchedulerLimits
from engine.steps.speculator import Speculator
from engine.text.grammar import Grammars
from tests.clock import ManualClock

BLOCK_SIZE = 4
FAKE_GRAMMARS = Grammars(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_TOKEN_ID}))
T = TypeVar("T")
Floats = npt.NDArray[np.float32]


def make_request(
    prompt: Sequence[int], *, output: Sequence[int] = (), block_size: int = BLOCK_SIZE, salt: str = "", **sampling: Any
) -> EngineRequest:
    """Return a request; sampling defaults to 8 greedy tokens."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8} | sampling
    first_sample_index = params.pop("first_sample_index", 0)
    root = hash_root(model_fingerprint=f"fake-v1-{block_size}", cache_salt=salt)
    chosen = SamplingParams(**params)
    return EngineRequest(
        request_id=RequestId("req-test"),
        prompt_token_ids=as_tokens(prompt),
        output_token_ids=as_tokens(output),
        sampling=chosen,
        grammar=FAKE_GRAMMARS.compile(chosen.structured_outputs) if chosen.structured_outputs else None,
        hash_root=root,
        block_hashes=hash_blocks([*prompt, *output], root=root, block_size=block_size),
        first_sample_index=first_sample_index,
    )


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    max_step_tokens: int = 64,
    max_running: int = 16,
    max_waiting: int = 64,
    max_model_len: int = 512,
    max_steps_in_flight: int = 2,
    clock: Clock | None = None,
    speculator: Speculator | None = None,
    window: FakeWindow | None = None,
) -> EngineCore:
    """Return a core over the fake engine."""
    executor = FakeExecutor(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_steps_in_flight=max_steps_in_flight,
    )
    if window is not None:
        executor.add_window(window)
    limits = SchedulerLimits(
        block_size=block_size, max_step_tokens=max_step_tokens, max_running=max_running, max_waiting=max_waiting
    )
    return EngineCore(executor, limits, clock or ManualClock(), speculator)


def core_on(
    executor: Executor,
    *,
    block_size: int = BLOCK_SIZE,
    max_step_tokens: int = 32,
    max_running: int = 8,
    speculator: Speculator | None = None,
) -> EngineCore:
    """Return a core over an executor of a model."""
    limits = SchedulerLimits(
        block_size=block_size, max_step_tokens=max_step_tokens, max_running=max_running, max_waiting=64
    )
    return EngineCore(executor, limits, ManualClock(), speculator)


class Collector:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)

    @property
    def outputs(self) -> list[TokenOutput]:
        """All tokens, in order of arrival."""
        return [token for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    def token_ids(self, sample_index: int = 0) -> list[int]:
        """One sample's tokens; their indexes are consecutive."""
        outputs = [o for o in self.outputs if o.sample_index == sample_index]
        assert [o.token_index for o in outputs] == list(
            range(outputs[0].token_index, outputs[0].token_index + len(outputs))
        )
        return [o.token_id for o in outputs]

    @property
    def failure(self) -> Failed | None:
        """The failure, if any."""
        return next((event for event in self.events if isinstance(event, Failed)), None)


def granted(answer: T | Refused) -> T:
    """Return what an engine gave, which must not be a refusal."""
    assert not isinstance(answer, Refused), answer
    return answer


def submit(core: EngineCore, request: EngineRequest) -> tuple[Group, Collector]:
    """Add a request that must be accepted."""
    collector = Collector()
    return granted(core.add(request, collector)), collector


def run_until_idle(core: EngineCore, *, max_steps: int = 10_000) -> int:
    """Step until nothing is left, delivering events; returns the number of steps."""
    for num_steps in range(max_steps):
        if not core.has_work:
            return num_steps
        for group, event in core.step():
            group.sink(event)
        core.wake()
    raise AssertionError(f"still busy after {max_steps} steps")


def served(core: EngineCore, request: EngineRequest) -> Collector:
    """Serve a request to its end, with all others, and return what it was sent."""
    _group, collector = submit(core, request)
    run_until_idle(core)
    return collector


def expected_tokens(request: EngineRequest, *, sample: int = 0) -> list[int]:
    """Return the fake engine's answer computed without pages, batches or schedulers: the oracle."""
    output = list(request.output_token_ids)
    kv = list(expected_kv([*request.prompt_token_ids, *output]))
    grammar = request.grammar.begin() if request.grammar is not None else None
    while len(output) < request.sampling.max_tokens:
        chosen = choose(
            request.sampling,
            context_state(np.array(kv)),
            sample_index=request.first_sample_index + sample,
            index=len(output),
            allowed=grammar.allowed(output) if grammar is not None else None,
        )
        output.append(chosen.token_id)
        kv.append(np.uint64(token_kv(chosen.token_id, len(kv))))
        if chosen.token_id == EOS_TOKEN_ID and not request.sampling.ignore_eos:
            break
    return output[len(request.output_token_ids) :]


def expected_kv(token_ids: Sequence[int]) -> U64:
    """Return what the fake engine's pages hold of some tokens."""
    return np.array([token_kv(token_id, position) for position, token_id in enumerate(token_ids)], np.uint64)


def expected_embedding(prompt: Sequence[int], pooling: Pooling) -> Floats:
    """Return the fake engine's embedding, not normalized, computed without pages or steps: the oracle."""
    kv = expected_kv(prompt)
    if pooling is Pooling.LAST:
        return hidden_state(kv)
    states = np.array([hidden_state(kv[: i + 1]) for i in range(len(prompt))], np.float64)
    vector: Floats = states.mean(axis=0).astype(np.float32)
    return vector


def assert_empty(core: EngineCore) -> None:
    """Nothing is held any more."""
    load = core.load()
    held = (load.num_running, load.num_waiting, load.num_reserved, load.num_held, load.num_used_blocks)
    assert held == (0, 0, 0, 0, 0), held
    if core.pool.windows is not None:
        assert (core.pool.windows.num_needed, core.pool.windows.num_promised) == (0, 0)
