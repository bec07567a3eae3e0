"""Tests of `model.engine: vllm` need vLLM beside kvrelay: `make test-vllm` runs them in a venv of its own.

A vLLM takes half a minute of CPU to start. So the tests of a module share one, and one other process asks vLLM's own
`LLM.generate` for everything that they are compared with.
"""

import asyncio
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from common.engines import VLLM_VERSION, installed_package, vllm_version
from common.errors import Refused
from engine.events import EngineEvent, EngineLoad, Failed, PrefillProgress, TokenOutput, Tokens
from engine.options import EngineOptions
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.scheduler import SchedulerLimits
from engine.vllm.engine import VllmEngine
from engine.vllm.start import start_vllm
from tests.builders import make_request
from tests.short_model import write_short_model

ANSWER_S = 300.0
BLOCK_SIZE = 32
NUM_BLOCKS = 24
MAX_TOKENS = 24
NEAR_TIE = 0.25
"""Largest difference of two logits that counts as none in bfloat16."""
_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 150)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_version(installed_package) != VLLM_VERSION:
        skip = pytest.mark.skip(reason=f"vLLM {VLLM_VERSION} is not installed here: run `make test-vllm`")
        for item in items:
            if "tests/vllm/" in item.nodeid:
                item.add_marker(skip)


def options(model_dir: Path, **changes: Any) -> EngineOptions:
    limits = {"num_blocks": NUM_BLOCKS, "max_model_len": 512, "max_step_tokens": 64, "max_running": 8} | changes
    return EngineOptions(model_dir=model_dir, model_name="short", device="cpu", block_size=BLOCK_SIZE, **limits)


def request_of(prompt: Sequence[int], **sampling: Any) -> Any:
    return make_request(prompt, block_size=BLOCK_SIZE, **{"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling)


class Answer:
    """What an engine says of one request."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_left = 0
        self.group: Group | None = None

    async def of(self, enter: Callable[..., Group | Refused], request: EngineRequest) -> "Answer":
        """Let a request enter, and wait for its end."""
        self._num_left = request.sampling.n
        group = enter(request, self._sink)
        assert isinstance(group, Group), group
        self.group = group
        await asyncio.wait_for(self._over, ANSWER_S)
        return self

    def _sink(self, event: EngineEvent) -> None:
        self.events.append(event)
        assert self.group is not None, "vLLM answers later"
        is_over = isinstance(event, Failed) or (self.group.holds_after_prefill and isinstance(event, Tokens))
        if isinstance(event, Tokens):
            self._num_left -= sum(token.finish_reason is not None for token in event.tokens)
        if (is_over or not self._num_left) and not self._over.done():
            self._over.set_result(None)

    @property
    def outputs(self) -> list[TokenOutput]:
        failed = [event.error for event in self.events if isinstance(event, Failed)]
        assert not failed, failed
        return [token for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    def token_ids(self, sample_index: int = 0) -> list[int]:
        return [output.token_id for output in self.outputs if output.sample_index == sample_index]


async def answer(engine: VllmEngine, request: EngineRequest) -> Answer:
    return await Answer().of(engine.add, request)


async def answers_of(engine: VllmEngine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    found = await asyncio.gather(*(answer(engine, request_of(prompt, **sampling)) for prompt in prompts))
    return [each.token_ids() for each in found]


_told: dict[VllmEngine, asyncio.Event] = {}
"""Set by the reports of each engine."""


@asynccontextmanager
async def running_engine(told: EngineOptions, **arguments: Any) -> AsyncIterator[VllmEngine]:
    """Start a vLLM for the block, which nobody may leave anything in."""
    names = shared_names()
    vllm = await asyncio.to_thread(start_vllm, told, arguments)
    limits = SchedulerLimits(
        block_size=BLOCK_SIZE, max_step_tokens=told.max_step_tokens, max_running=told.max_running, max_waiting=64
    )
    engine = VllmEngine(vllm, limits, SystemClock())
    faults: list[Exception] = []
    told_of = _told[engine] = asyncio.Event()
    engine.open(lambda _report: told_of.set(), faults.append)
    try:
        yield engine
        await until_empty(engine)
        assert not faults
    finally:
        del _told[engine]
        await engine.aclose()
    assert not shared_names() - names, "shared memory is left"


async def until_empty(engine: VllmEngine) -> None:
    """Wait until vLLM has confirmed the end of every request; all pages and slots are free then."""
    await until(engine, lambda load: not load.num_used_blocks and not load.num_running)
    kv = engine._vllm.kv  # noqa: SLF001 - its slots are nobody's
    assert kv.num_free == kv.num_blocks


async def until(engine: VllmEngine, is_so: Callable[[EngineLoad], bool]) -> None:
    """Wait for a load."""
    async with asyncio.timeout(ANSWER_S):
        while not is_so(engine.load()):
            _told[engine].clear()
            await _told[engine].wait()


async def handed_over(engine: VllmEngine, prompt: Sequence[int], **sampling: Any) -> list[int]:
    """Return an answer whose prompt is computed for a puller, and which goes on where no block of it is cached."""
    sent = await computed_for_a_puller(engine, prompt, **sampling)
    received = Answer()

    def enter(request: Any, sink: Any) -> Any:
        group = engine.reserve(request, sink)
        pull(engine, sent, group)
        return group

    await received.of(enter, request_of(prompt, salt=f"receiver {prompt[0]}", **sampling))
    await until_empty(engine)
    return [*sent.token_ids(), *received.token_ids()]


async def computed_for_a_puller(engine: VllmEngine, prompt: Sequence[int], **sampling: Any) -> Answer:
    """Return the first token of a prompt whose KV is held."""
    sent = await Answer().of(engine.add_prefill_only, request_of(prompt, salt="sender", **sampling))
    progress = [event for event in sent.events if isinstance(event, PrefillProgress)]
    assert progress[-1].num_computed_tokens == len(prompt)
    return sent


def pull(engine: VllmEngine, sent: Answer, group: Group | Refused | None) -> None:
    """Fill a reservation with the KV that is held, and let it start."""
    assert isinstance(group, Group), group
    assert sent.group is not None
    kv = engine._vllm.kv  # noqa: SLF001 - as the worker's puller has it
    kv.write_blocks(group.leader.block_ids(), kv.read_blocks(sent.group.leader.block_ids()))
    engine.cancel(sent.group)
    engine.commit(group, group.leader.num_tokens)
    engine.start(group, [(sent.token_ids()[0], False)])


async def first_differences(
    engine: VllmEngine,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[list[int]],
    right: Sequence[list[int]],
    *,
    near_tie: float = NEAR_TIE,
) -> list[str]:
    """Return where answers are not the right ones; nothing where they part at a near tie of two tokens in bfloat16.

    There the sums of a step depend on how a prompt was cut and on what is beside it, and a logit between 16 and 32 is
    rounded to 1/8.
    """
    each_of = zip(prompts, answers, right, strict=True)
    found = [await _first_difference(engine, *each, near_tie=near_tie) for each in each_of]
    return [each for each in found if each]


async def _first_difference(
    engine: VllmEngine, prompt: Sequence[int], found: Sequence[int], right: Sequence[int], *, near_tie: float
) -> str:
    if list(found) == list(right):
        return ""
    at = next(i for i, (one, other) in enumerate(zip(found, right, strict=True)) if one != other)
    told = await answer(engine, request_of([*prompt, *found[:at]], max_tokens=1, num_logprobs=20))
    logprobs = told.outputs[0].logprobs
    assert logprobs is not None
    of = dict(logprobs.top)
    gap = abs(of[found[at]] - of[right[at]]) if {found[at], right[at]} <= of.keys() else math.inf
    is_tie = engine._vllm.kv.shape.dtype == "bfloat16" and gap <= near_tie  # noqa: SLF001 - the dtype of its pages
    return "" if is_tie else f"prompt of {len(prompt)}, token {at}: {found[at]}, not {right[at]}, {gap:.3f} apart"


@pytest.fixture(scope="session")
def short_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("short-model"))


@pytest.fixture(scope="session")
def int4_model_dir(short_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 bits in groups of 32, as `kvrelay quantize` writes them."""
    from engine.model.checkpoints.quantizing import Rounding, quantize_checkpoint

    folder = tmp_path_factory.mktemp("quantized") / "int4"
    quantize_checkpoint(short_model_dir, folder, Rounding(bits=4, group_size=32), lambda _line: None)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(100, 40_000) for _ in range(length)] for length in _LENGTHS]


@pytest.fixture(scope="session")
def generated(short_model_dir: Path, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Answers of vLLM's own `LLM.generate` of the short model to `prompts`, by dtype."""
    dtypes = ("float32", "bfloat16")
    answers = generate([(short_model_dir, dtype) for dtype in dtypes], prompts)
    return dict(zip(dtypes, answers, strict=True))


def generate(models: Sequence[tuple[Path, str]], prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Return the answers of vLLM's own `LLM.generate` to prompts, for each model and dtype."""
    jobs = [
        {"model": str(model_dir), "dtype": dtype, "prompts": prompts, "max_tokens": MAX_TOKENS}
        for model_dir, dtype in models
    ]
    command = [sys.executable, "-m", "tests.vllm.generate"]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def shared_names() -> set[str]:
    """Return the names in shared memory that no other process uses, without those that Intel's OpenMP gives to a whole
    process.
    """
    in_use: set[str] = set()
    for process in set(os.listdir("/proc")) - {str(os.getpid())}:
        with suppress(OSError):  # it has ended, or is none
            maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
            in_use |= {line.split()[4] for line in maps.splitlines() if "/dev/shm/" in line}
    with os.scandir("/dev/shm") as names:
        return {each.name for each in names if not each.name.startswith("__KMP_") and str(each.inode()) not in in_use}
