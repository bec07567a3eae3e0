"""The project's central test: the cluster's answers are those of plain `transformers`, token for token.

Real SmolLM2, fp32, greedy. 60 prompts around every block and chunk boundary, with shared prefixes and one of 1,900
tokens, in every mode that moves or recomputes KV differently. Two modes run in real processes: one with the whole model
and every ninth prompt but the longest, one with all prompts. That one and those whose workers share this process, with
every third prompt, have a model of its first layers and tokens, which takes a tenth of the time and every path of the
whole.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.config import parse_config
from common.model_files import default_model_dir
from common.sampling import SamplingParams
from engine.executor import Executor
from engine.loading import load_executor
from engine.ops.cpu.build import NotBuilt, build_kernels
from engine.ops.select import cpu_runs_kernels
from engine.options import EngineOptions
from kvrelay.client import AsyncClient, Generation
from tests.e2e.harness import killed_midway, running_cluster, until_idle, worker
from tests.e2e.in_process import running_system
from tests.short_model import write_short_model
from worker.inprocess import LocalEngine

pytestmark = [
    pytest.mark.usefixtures("rates_measured_once"),
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.timeout(900),
]

MAX_TOKENS = 12
NUM_PROMPTS = 60
LONG_PROMPT = 1900
BLOCK_SIZE = 16
VOCAB_SIZE = 4096
"""Tokens that the short model knows, of 49,152."""
_BOUNDARIES = [1, 2, 3, *(base + d for base in (16, 32, 48, 64, 112, 128, 256) for d in (-1, 0, 1))]
_CHUNKS = [511, 512, 513, 14, 21, 70]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ids of frequent tokens of the license text: 30 boundary lengths, 29 with one of three prefixes, one long."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    text = [token_id for token_id in tokenizer.encode(license_text).ids if token_id < VOCAB_SIZE]
    text += text[::-1]  # it alone is shorter than the long prompt
    cut = [text[11 * i : 11 * i + length] for i, length in enumerate([*_BOUNDARIES, *_CHUNKS])]
    prefixes = [text[300:396], text[700:763], text[900:916]]
    num_shared = NUM_PROMPTS - 1 - len(cut)
    shared = [[*prefixes[i % 3], *text[40 * i : 40 * i + 5 + i]] for i in range(num_shared)]
    found = [*cut, *shared, text[:LONG_PROMPT]]
    assert len(found) == NUM_PROMPTS
    assert len(found[-1]) == LONG_PROMPT
    return found


@pytest.fixture(scope="module")
def short_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("short-model"), num_layers=2, vocab_size=VOCAB_SIZE)


class Oracle:
    """Plain `transformers` on one process, as a judge.

    An answer is right when, for each of its tokens, the model's most probable token after everything before it is that
    token: by induction this is what greedy generation yields, at the price of one forward pass instead of twelve.
    """

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._eos = self._model.generation_config.eos_token_id
        self._right: dict[tuple[int, ...], tuple[int, ...]] = {}

    def complaint(self, prompt: list[int], answer: tuple[int, ...], *, max_tokens: int = MAX_TOKENS) -> str | None:
        """Return what is wrong with an answer, or None."""
        key = (*prompt, -max_tokens)
        if key in self._right:
            return None if answer == self._right[key] else f"{answer} is not {self._right[key]}"
        if len(answer) != max_tokens and (not answer or answer[-1] != self._eos):
            return f"ends after {len(answer)} tokens without an end-of-sequence token"
        with self._torch.inference_mode():
            given = self._torch.tensor([[*prompt, *answer]])
            logits = self._model(given, logits_to_keep=len(answer) + 1).logits[0, :-1]
        want = tuple(logits.argmax(-1).tolist())
        if answer != want:
            top = logits[next(i for i, (a, b) in enumerate(zip(answer, want, strict=True)) if a != b)].topk(2)
            return f"{answer} is not {want}; the first wrong one is {top.values[0] - top.values[1]:.2g} behind"
        self._right[key] = answer
        return None


@pytest.fixture(scope="module")
def short_oracle(short_model_dir: Path) -> Oracle:
    return Oracle(short_model_dir)


def model_config(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a serving.yaml for fp32; `prefill` and `decode` change pools, the others sections."""
    pool = {"kv_memory_gib": 0.5}
    return {
        "name": "oracle",
        "launcher": "local",
        "model": {"id": str(model_dir), "dtype": "float32"} | changes.get("model", {}),
        "pools": {"prefill": pool | changes.get("prefill", {}), "decode": pool | changes.get("decode", {})},
        "router": {"port": 0, "local_prefill_max_tokens": 0, "queue_timeout_s": 300.0} | changes.get("router", {}),
        "transfer": changes.get("transfer", {}),
        "slo": {"ttft_s": 600.0, "tpot_s": 600.0},  # on a slow machine, too, nothing waits for the sake of gaps
    }


SPECULATION = {"speculation": {"method": "ngram", "num_branches": 3}}
WHOLE_MODEL_MODE = "disaggregated over gRPC"
ALL_PROMPTS_MODE = "disaggregated over shm, then cached"
MODES: dict[str, dict[str, Any]] = {
    ALL_PROMPTS_MODE: {"transfer": {"transports": ["shm"]}},
    WHOLE_MODEL_MODE: {"transfer": {"transports": ["grpc"]}},
}


@pytest.mark.parametrize("mode", MODES)
async def test_cluster_equals_transformers(
    tmp_path: Path, mode: str, prompts: list[list[int]], short_model_dir: Path, short_oracle: Oracle
) -> None:
    model_dir, oracle = short_model_dir, short_oracle
    if mode == WHOLE_MODEL_MODE:
        model_dir = default_model_dir()
        oracle, prompts = Oracle(model_dir), prompts[-2::-9]
    async with running_cluster(tmp_path, model_config(model_dir, **MODES[mode]), timeout_s=600) as client:
        for attempt in ["cold", "cached"] if "cached" in mode else ["cold"]:
            answers = await _all(client, prompts)
            _assert_right(oracle, prompts, answers)
            _check_mode(mode, attempt, answers)
        if mode == ALL_PROMPTS_MODE:
            await _check_kill(client, prompts)
        await until_idle(client)


async def test_prompts_computed_on_decode_workers_get_transformers_answers(
    prompts: list[list[int]], short_model_dir: Path, short_oracle: Oracle
) -> None:
    router = {"policy": "round_robin", "local_prefill_max_tokens": 4096}
    async with short_system(short_model_dir, router, max_step_tokens=256) as client:
        answers = await _all(client, prompts[2::3])
    _assert_right(short_oracle, prompts[2::3], answers)
    assert {answer.plan.kind for answer in answers} == {"local"}


async def test_answers_that_lost_their_pages_are_those_of_transformers(
    prompts: list[list[int]], short_model_dir: Path, short_oracle: Oracle
) -> None:
    prompts, router = prompts[2:-1:3], {"local_prefill_max_tokens": 24}
    async with short_system(short_model_dir, router, num_blocks=40, max_step_tokens=256) as client:
        _assert_right(short_oracle, prompts, await _all(client, prompts))
        # Twelve short prompts are admitted together and grow to 72 pages and more, of which there are 40.
        prompts = prompts[:4] * 3
        for _ in range(5):  # where all else is slow, they may come one after the other
            answers = await _all(client, prompts, max_tokens=80)
            _assert_right(short_oracle, prompts, answers, max_tokens=80)
            view = await worker(client, "decode")
            if view.status is not None and view.status.num_preemptions:
                break
        else:
            pytest.fail("no answer has lost its pages")


async def test_prompts_computed_seven_tokens_a_step_get_transformers_answers(
    prompts: list[list[int]], short_model_dir: Path, short_oracle: Oracle
) -> None:
    prompts, router = prompts[2:-1:3], {"local_prefill_max_tokens": 40}
    async with short_system(short_model_dir, router, max_step_tokens=7, max_running=7) as client:
        answers = await _all(client, prompts)
    _assert_right(short_oracle, prompts, answers)
    assert {answer.plan.kind for answer in answers} == {"local", "remote"}


@asynccontextmanager
async def short_system(
    model_dir: Path, router: dict[str, Any], *, num_blocks: int = 1024, **workers: Any
) -> AsyncIterator[AsyncClient]:
    """Run a prefill and a decode worker with the short model in this process; both end empty."""
    options = EngineOptions(
        model_dir=model_dir,
        model_name="short",
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )

    def load() -> Executor:
        return load_executor(options)

    async with running_system(load=load, router=router, **workers) as system, system.client() as client:
        yield client
        await system.until_idle()


def _assert_right(
    oracle: Oracle, prompts: list[list[int]], answers: list[Generation], *, max_tokens: int = MAX_TOKENS
) -> None:
    """Fail unless every answer is the oracle's."""
    judged = [
        (len(prompt), oracle.complaint(prompt, answer.token_ids, max_tokens=max_tokens))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert not [found for found in judged if found[1]]


async def _all(client: AsyncClient, prompts: list[list[int]], *, max_tokens: int = MAX_TOKENS) -> list[Generation]:
    limit = asyncio.Semaphore(12)
    is_short = max_tokens == MAX_TOKENS

    async def one(prompt: list[int]) -> Generation:
        async with limit:
            return await client.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=not is_short)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _check_mode(mode: str, attempt: str, answers: list[Generation]) -> None:
    """The mode was really exercised."""
    assert {answer.plan.kind for answer in answers} == {"remote"}
    transport = "shm" if "shm" in mode else "grpc"
    assert {answer.transfer.transport for answer in answers if answer.transfer.num_blocks} == {transport}
    if attempt == "cached":
        assert answers[-1].usage.num_cached_tokens == LONG_PROMPT // BLOCK_SIZE * BLOCK_SIZE
        assert answers[-1].transfer.num_blocks == 1


async def _check_kill(client: AsyncClient, prompts: list[list[int]]) -> None:
    """A sampled answer is the same alone, in a batch and after its decode worker was killed."""
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 320, "ignore_eos": True}
    prompt = prompts[20]
    alone = await client.generate(prompt, **options)
    crowd = [client.generate(other, temperature=1.0, max_tokens=48) for other in prompts[21:36]]
    in_batch, *_ = await asyncio.gather(client.generate(prompt, **options), *crowd)
    (killed,) = await killed_midway(client, partial(client.stream, prompt, **options))
    assert alone.token_ids == in_batch.token_ids == killed.token_ids
    assert alone.text == in_batch.text == killed.text


async def test_drafted_answers_are_those_without_after_a_decode_workers_kill(
    tmp_path: Path, prompts: list[list[int]], short_model_dir: Path, short_oracle: Oracle
) -> None:
    if not cpu_runs_kernels() or isinstance(build_kernels(), NotBuilt):
        pytest.skip("no compiled kernels on this machine: nothing is drafted")
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}  # it soon repeats itself
    sampled = greedy | {"temperature": 0.6, "seed": 7, "max_tokens": 240}
    async with running_cluster(tmp_path, model_config(short_model_dir, model=SPECULATION), timeout_s=600) as client:
        # The worker measures its steps, and begins to draft.
        await asyncio.gather(*(client.generate(prompt, **greedy) for prompt in prompts[20:24]))
        asks = [partial(client.stream, prompts[30], **options) for options in (greedy, sampled)]
        answers = await killed_midway(client, *asks, num_tokens=64)  # some of them were drafted
        assert short_oracle.complaint(prompts[30], answers[0].token_ids, max_tokens=400) is None
        assert answers[1].token_ids == _without_drafts(short_model_dir, prompts[30], sampled)
        for answer in answers:
            attempts = [decision.outcome for decision in await client.explain(answer.request_id)]
            assert sum(each.num_accepted_tokens for each in attempts) == answer.usage.num_accepted_tokens > 0
            assert answer.usage.num_accepted_tokens <= answer.usage.num_drafted_tokens
        await until_idle(client)


def _without_drafts(model_dir: Path, prompt: list[int], options: dict[str, Any]) -> tuple[int, ...]:
    """Return the answer of an engine in this process, token by token."""
    pool = {"kv_memory_gib": 0.1}
    model = {"id": str(model_dir), "dtype": "float32"}
    config = parse_config({"model": model, "pools": {"prefill": pool, "decode": pool}}, source="test")
    return tuple(each.token_id for each in LocalEngine.load(config).stream(prompt, SamplingParams(**options)))
