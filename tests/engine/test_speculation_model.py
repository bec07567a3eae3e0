"""Speculation over the compiled CPU kernels: real weights, and answers that are equal to the last bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import ServingConfig
from common.ids import BlockId
from common.sampling import SamplingParams
from common.structured_outputs import structure_text
from common.text_files import load_tokenizer
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import EngineLoad, TokenOutput
from engine.executor import Branch, ScheduledSequence
from engine.ops.select import load_cpu_kernels
from engine.request import EngineRequest
from engine.runner import ModelExecutor
from engine.sequence import Sequence as EngineSequence
from engine.speculation.ngram import NgramDrafter
from engine.steps.speculator import Rule, Speculator
from engine.text.grammar import Grammars
from tests.builders import assert_empty, core_on, make_request, run_until_idle, submit
from tests.engine.drafting import GuessingDrafter, eager
from tests.engine.driver import Driver, load, make_sequence
from tests.short_model import cut_tokenizer, write_short_model
from worker.inprocess import LocalEngine, SampleText

pytestmark = pytest.mark.model

BLOCK_SIZE = 16
VOCAB_SIZE = 2048
NUM_SCARCE_BLOCKS = 30
"""Too few for all requests at once."""
TEXT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 3
STRUCTURE = structure_text({"regex": '(\\{"a": [0-9], "b": [0-9]\\},? ?){4,9}'})
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 5, "top_p": 0.9, "num_logprobs": 2},
    {"repetition_penalty": 1.05, "frequency_penalty": 0.1, "num_logprobs": 1},
    {"temperature": 1.0, "seed": 6, "top_k": 3, "n": 2, "min_tokens": 9, "logit_bias": ((40, 2.0),)},
    {"temperature": 1.0, "seed": 7},  # structured
]


@pytest.fixture(name="model_dir", scope="module")
def _model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_short_model(tmp_path_factory.mktemp("short"), num_layers=2, vocab_size=VOCAB_SIZE)
    cut_tokenizer(folder, VOCAB_SIZE)
    return folder


def load_verifying(model_dir: Path, dtype: str, num_blocks: int = 512) -> ModelExecutor[Any]:
    """Return an executor on compiled kernels; skips where there are none."""
    executor = load(model_dir, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    if not executor.verifies_drafts:
        pytest.skip("no compiled kernels on this machine")
    return executor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_prompt_tokens", [20, 300])
@torch.inference_mode()
def test_verified_rows_have_the_bits_of_steps_of_their_own(model_dir: Path, dtype: str, num_prompt_tokens: int) -> None:
    executor = load_verifying(model_dir, dtype)
    sampling = make_request([1], temperature=1.0, seed=3, num_logprobs=3, max_tokens=64).sampling
    driver, prompt = Driver(executor), [(i * 7919) % 1900 + 100 for i in range(num_prompt_tokens)]
    one, all_at_once, other = (
        make_sequence(p, sampling=sampling, block_size=BLOCK_SIZE) for p in (prompt, prompt, [5])
    )
    driver.step([(one, num_prompt_tokens), (all_at_once, num_prompt_tokens), (other, 1)])
    sampled = [driver.step([(one, 1)])[0].sampled[0] for _ in range(9)]
    draft = as_tokens([each.token_id for each in sampled[:8]])
    table = all_at_once.block_table
    while len(table) < len(one.block_table):
        table.append(driver.free.pop())
    batch = [ScheduledSequence(other, 1, 1), ScheduledSequence(all_at_once, 9, 1, draft=draft)]
    _, result = executor.launch(batch).results()
    assert result.sampled == sampled  # log-probabilities, too
    num_tokens = num_prompt_tokens + 9
    for layer in executor._store.layers:  # noqa: SLF001 - the bits of the KV are the point
        for cache in layer:
            pages = [cache[list(s.block_table)].flatten(0, 1)[:num_tokens] for s in (one, all_at_once)]
            assert torch.equal(*pages)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("kv_dtype", "num_prompt_tokens", "depth", "num_ranks"),
    [
        *(("auto", 20, 0, 1), ("auto", 28, 2, 1), ("auto", 32, 1, 1), ("int8", 300, 3, 1), ("int4", 300, 3, 1)),
        *(("auto", 28, 2, 3), ("int8", 300, 3, 3)),
    ],
)
@torch.inference_mode()
def test_rows_of_a_branch_have_the_bits_of_steps_of_their_own(
    model_dir: Path, kv_dtype: str, num_prompt_tokens: int, depth: int, num_ranks: int
) -> None:
    if load_cpu_kernels(torch.bfloat16) is None:
        pytest.skip("no compiled kernels on this machine")
    options = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "tensor_parallel": num_ranks}
    executor = load(model_dir, block_size=BLOCK_SIZE, num_blocks=128, **options)
    sampling = make_request([1], temperature=1.0, seed=3, num_logprobs=3, max_tokens=64).sampling
    driver, prompt = Driver(executor), [(i * 7919) % 1900 + 100 for i in range(num_prompt_tokens)]
    one, tree = (make_sequence(prompt, sampling=sampling, block_size=BLOCK_SIZE) for _ in range(2))
    driver.step([(one, num_prompt_tokens), (tree, num_prompt_tokens)])
    sampled = [driver.step([(one, 1)])[0].sampled[0] for _ in range(7)]
    right = as_tokens([each.token_id for each in sampled[:6]])
    wrong = right[:]
    wrong[depth] ^= 1
    num_shared = tree.num_computed // BLOCK_SIZE
    branch = Branch(depth, right[depth:], num_shared, tree.block_table[:num_shared])
    while len(tree.block_table) < len(one.block_table):
        tree.block_table.append(driver.free.pop())
    while len(branch.block_table) < len(one.block_table):
        branch.block_table.append(driver.free.pop())
    if tree.num_computed % BLOCK_SIZE:
        executor.kv.copy_block(BlockId(tree.block_table[num_shared]), BlockId(branch.block_table[num_shared]))
    (result,) = executor.launch([ScheduledSequence(tree, 7, 1, draft=wrong, branches=(branch,))]).results()
    assert result.branch is branch
    assert result.sampled == sampled  # log-probabilities, too
    num_tokens = num_prompt_tokens + 7
    num_full, tables = num_tokens // BLOCK_SIZE, (one.block_table, branch.block_table)
    for layer in executor._store.layers:  # noqa: SLF001 - the bits of the KV are the point
        for cache in layer:
            assert torch.equal(*(cache[list(table[:num_full])] for table in tables))
            if kv_dtype == "auto":
                assert torch.equal(*(cache[list(table)].flatten(0, 1)[:num_tokens] for table in tables))


def requests_of(model_dir: Path, executor: ModelExecutor[Any]) -> list[EngineRequest]:
    """Return a request of every kind; their prompts repeat themselves and share their beginning."""
    tokenizer = load_tokenizer(model_dir)
    grammars = Grammars(tokenizer, vocab_size=executor.vocab_size, eos_token_ids=executor.eos_token_ids)
    requests = []
    for i, sampling in enumerate(SAMPLINGS):
        prompt = tokenizer.encode(TEXT + f"# number {i}\n" + TEXT[: 40 + 30 * i]).ids
        request = make_request(prompt, block_size=BLOCK_SIZE, max_tokens=40, ignore_eos=True, **sampling)
        if i == len(SAMPLINGS) - 1:
            structured = replace(request.sampling, structured_outputs=STRUCTURE, ignore_eos=False)
            request = replace(request, sampling=structured, grammar=grammars.compile(STRUCTURE))
        requests.append(request)
    return requests


def serve(
    executor: ModelExecutor[Any], requests: Sequence[EngineRequest], speculator: Speculator | None, **limits: int
) -> tuple[list[dict[int, list[TokenOutput]]], EngineCore]:
    """Serve requests in one batch on an empty cache; return the outputs of each, by sample, and the core."""
    sizes = {"max_step_tokens": 256, "max_running": 16} | limits
    core = core_on(executor, block_size=BLOCK_SIZE, speculator=speculator, **sizes)
    collectors = [submit(core, request)[1] for request in requests]
    run_until_idle(core)
    assert_empty(core)
    samples = [range(request.sampling.n) for request in requests]
    outputs = [
        {sample: [o for o in each.outputs if o.sample_index == sample] for sample in of}
        for each, of in zip(collectors, samples, strict=True)
    ]
    return outputs, core


@pytest.mark.parametrize(
    ("dtype", "limits", "num_blocks"),
    # Prompts that are computed in other pieces have other roundings, which bfloat16 would show.
    [("bfloat16", {}, 512), ("float32", {"max_step_tokens": 24}, 512), ("float32", {}, NUM_SCARCE_BLOCKS)],
    ids=["one batch", "chunked", "preempted"],
)
def test_real_answers_of_every_kind_are_those_without_speculation(
    model_dir: Path, dtype: str, limits: dict[str, int], num_blocks: int
) -> None:
    executor = load_verifying(model_dir, dtype, num_blocks)
    requests = requests_of(model_dir, executor)
    plain, before = serve(executor, requests, None, **limits)
    known = {
        id(r): {i: [o.token_id for o in each] for i, each in a.items()} for r, a in zip(requests, plain, strict=True)
    }

    def answer_of(sequence: EngineSequence) -> list[int]:
        return known[id(sequence.request)][sequence.sample_index]

    tree = GuessingDrafter(answer_of, rate=0.6, num_branches=2)
    for drafter in (GuessingDrafter(answer_of, rate=0.85), tree, NgramDrafter(num_branches=2)):
        speculated, core = serve(executor, requests, eager(drafter, num_tokens=7), **limits)
        assert speculated == plain
        load = core.load()
        assert 0 < load.num_accepted_tokens < load.num_drafted_tokens
    assert bool(before.load().num_preemptions) == (num_blocks == NUM_SCARCE_BLOCKS)


def test_rejection_rule_leaves_greedy_answers_and_accepts_drafts_of_sampled_ones(model_dir: Path) -> None:
    executor = load_verifying(model_dir, "bfloat16")
    greedy, sampled, *_ = requests_of(model_dir, executor)
    plain, _ = serve(executor, [greedy, sampled], None)
    speculator = eager(NgramDrafter(), num_tokens=7, rule=Rule.REJECTION)
    drafted, core = serve(executor, [greedy, sampled], speculator)
    assert drafted[0] == plain[0]
    assert len(drafted[1][0]) == len(plain[1][0])
    assert all(output.logprobs and output.logprobs.token_id == output.token_id for output in drafted[1][0])
    assert 0 < core.load().num_accepted_tokens < core.load().num_drafted_tokens


@pytest.mark.parametrize("sampling", [{"n": 1}, {"n": 2, "temperature": 0.9, "seed": 3}], ids=["greedy", "two samples"])
def test_stop_string_inside_a_draft_ends_the_answer_where_it_does_without(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    executor = load_verifying(model_dir, "bfloat16")
    tokenizer = load_tokenizer(model_dir)
    drafter = GuessingDrafter(lambda sequence: free[sequence.sample_index], rate=1.0)

    def samples(speculator: Speculator | None, stop: tuple[str, ...] = ()) -> tuple[list[list[SampleText]], EngineLoad]:
        monkeypatch.setattr("worker.inprocess.speculator_for", lambda *_: speculator)
        engine = LocalEngine(executor, tokenizer, ServingConfig())
        asked = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=40, ignore_eos=True, stop=stop)
        tokens = list(engine.stream(tokenizer.encode(TEXT).ids, asked))
        load = engine.load_report()
        assert load.num_used_blocks == 0
        return [[each for each in tokens if each.sample_index == i] for i in range(asked.n)], load

    plain, _ = samples(None)
    free = [[each.token_id for each in sample] for sample in plain]
    text = ["".join(each.text for each in plain[0][:end]) for end in (18, 21)]
    stopped, _ = samples(None, (text[1][len(text[0]) - 1 :],))
    drafted, load = samples(eager(drafter, num_tokens=7), (text[1][len(text[0]) - 1 :],))
    assert drafted == stopped
    assert stopped[0][-1].finish_reason == "stop"
    num_told = sum(map(len, drafted))
    assert load.num_accepted_tokens > num_told // 2
    assert (len(drafted[0]) - 1) % 8, "the stop is inside a draft, not the last token of a step"
