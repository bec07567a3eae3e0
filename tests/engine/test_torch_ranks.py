"""Several ranks where torch computes, through gloo: against one process, up to the last bits of its sums."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from common.ids import BlockId
from common.process import CannotStart
from engine.ranks.decoder import TorchRankPart
from engine.ranks.group import RankGroup, RankLost
from engine.runner import KeptStates, ModelExecutor
from engine.weights.ranks import Rank
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.test_ranks import BLOCK_SIZE, SERVE, pages_of, save, sequences
from tests.engine.tiny_models import make_prompt

_DEADLINE_S = 60
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=4)


def load_ranks(folder: Path, num_ranks: int, **options: Any) -> ModelExecutor[Any]:
    """Return an executor without compiled kernels."""
    return load(folder, tensor_parallel=num_ranks, block_size=BLOCK_SIZE, kernels="torch", **options)


def answer(folder: Path, num_ranks: int, **options: Any) -> tuple[list[list[int]], list[bytes]]:
    """Return the answers to some prompts, in chunks and batches of several sizes, and the bytes of their pages."""
    executor, asked = load_ranks(folder, num_ranks, **options), sequences()
    answers = Driver(executor).generate(asked, num_tokens=NUM_TOKENS, chunk_size=20)
    return answers, [pages_of(executor, each) for each in asked]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "sizes", "options", "num_ranks"),
    [
        # 131 tokens, which no number of ranks divides
        ("llama-tied", {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}, {}, 3),
        # a key head that two ranks have
        ("qwen3", {"num_key_value_heads": 2}, {}, 4),
        (
            "qwen2_moe",
            {"num_key_value_heads": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
            {},
            2,
        ),
        # layers with pages of their own
        ("gemma3", {"num_key_value_heads": 4, "sliding_window": 24}, {"max_model_len": 128}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_ranks_in_torch_give_the_answers_and_nearly_the_pages_of_one(
    tmp_path: Path, name: str, sizes: dict[str, Any], options: dict[str, Any], num_ranks: int
) -> None:
    save(tmp_path, name, **sizes)
    answers, pages = answer(tmp_path, num_ranks, **options)
    expected, their_pages = answer(tmp_path, 1, **options)
    assert answers == expected
    for ours, theirs in zip(pages, their_pages, strict=True):
        found, wanted = (np.frombuffer(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("options", "atol"), [({"dtype": "bfloat16"}, 0.125), ({"kv_dtype": "int8"}, 0.05)], ids=["bfloat16", "int8"]
)
def test_ranks_in_torch_of_few_bits_come_close_and_promise_no_exact_resume(
    llama: Path, options: dict[str, Any], atol: float
) -> None:
    states = []
    for num_ranks in (1, 2):
        executor = load_ranks(llama, num_ranks, **options)
        assert not executor.exact_resume
        executor.kept_states = KeptStates(num_tokens=20)
        driver, sequence = Driver(executor), make_sequence(make_prompt(60), block_size=BLOCK_SIZE)
        driver.step([(sequence, 40)])
        [result] = driver.step([(sequence, 20)])
        assert result.states is not None
        states.append(result.states)
    np.testing.assert_allclose(states[1], states[0], atol=atol)


@pytest.mark.usefixtures("forked_ranks")
def test_a_prompt_of_two_ranks_in_torch_is_continued_by_one_and_resumed_by_three(tmp_path: Path) -> None:
    save(tmp_path, "llama", num_key_value_heads=6)
    prompt = [*make_prompt(3 * BLOCK_SIZE, seed=3), 1]
    one = load_ranks(tmp_path, 1)
    [expected] = Driver(one).generate([make_sequence(prompt, block_size=BLOCK_SIZE)], num_tokens=30)
    known, pages, num_blocks = prompt, b"", 0
    for num_ranks in (2, 1, 3):
        executor = load_ranks(tmp_path, num_ranks)
        assert executor.kv.shape == one.kv.shape
        assert executor.exact_resume
        driver, sequence = Driver(executor, seed=num_ranks), make_sequence(known, block_size=BLOCK_SIZE)
        held: list[BlockId] = [driver.free.pop() for _ in range(num_blocks)]
        if held:
            executor.kv.write_blocks(held, memoryview(pages))
        sequence.block_table.extend(held)
        sequence.num_computed = num_blocks * BLOCK_SIZE
        [found] = driver.generate([sequence], num_tokens=10)
        known = [*known, *found]
        num_blocks = sequence.num_computed // BLOCK_SIZE
        pages = pages_of(executor, sequence)
    assert known == [*prompt, *expected]


@pytest.mark.usefixtures("forked_ranks")
def test_pages_that_a_sequence_enters_hold_nothing_of_their_last_user_in_any_rank(llama: Path) -> None:
    answers = []
    for num_ranks in (1, 2):
        executor = load_ranks(llama, num_ranks)
        nan = np.full(executor.kv.num_blocks * executor.kv.shape.block_bytes // 4, np.nan, np.float32).tobytes()
        executor.kv.write_blocks([*map(BlockId, range(executor.kv.num_blocks))], memoryview(nan))
        answers.append(Driver(executor).generate(sequences(), num_tokens=NUM_TOKENS, chunk_size=20))
    assert answers[0] == answers[1]


def test_a_group_adds_up_from_first_to_last_and_misses_a_rank_that_is_lost() -> None:
    first = RankGroup(Rank(idx=0, size=3))
    groups = [first, *(RankGroup(Rank(idx=idx, size=3), os.dup(first.fd)) for idx in (1, 2))]
    given = (1.0, 1e8, -1e8)  # in another order 1

    def run(group: RankGroup) -> tuple[float, list[int]]:
        group.meet()
        idx = group.rank.idx
        sums = group.add_up(torch.full((2000, 3), given[idx]))
        assert (sums == sums[0, 0]).all()
        return sums[0, 0].item(), group.gather(torch.tensor([idx, 7])).flatten().tolist()

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(run, groups)] == [(0.0, [0, 7, 1, 7, 2, 7])] * 3
    del groups
    with pytest.raises(RankLost):
        first.gather(torch.zeros(1))


@pytest.mark.parametrize("victim", ["first", "other"])
def test_sigkill_of_a_rank_in_torch_ends_all_of_them(llama: Path, victim: str) -> None:
    command = [sys.executable, "-c", SERVE, str(llama), "2", "torch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as served:
        assert served.stdout is not None and served.stdout.readline() == b"an answer\n"
        [rank] = psutil.Process(served.pid).children()
        os.kill(rank.pid if victim == "other" else served.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([rank], _DEADLINE_S)
        assert served.wait(_DEADLINE_S) in ((1, 70) if victim == "other" else (-signal.SIGKILL,))
    assert not alive


def test_rank_that_is_stopped_while_it_loads_is_named_and_ended(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_part, before = TorchRankPart.load, {*psutil.Process().children()}
    ranks: list[psutil.Process] = []

    def stop_the_last(*given: Any) -> TorchRankPart:
        ranks.extend(each for each in psutil.Process().children() if each not in before)
        ranks[-1].suspend()
        return load_part(*given)

    monkeypatch.setattr(TorchRankPart, "load", stop_the_last)
    monkeypatch.setattr("engine.ranks.leader.LOAD_S", 1.0)
    monkeypatch.setattr("engine.ranks.leader._CLOSE_TIMEOUT_S", 0.1)
    with pytest.raises(CannotStart, match=r"rank 1 \(process \d+\) has no weights \d+ s after the first one"):
        load_ranks(llama, 2)
    assert len(ranks) == 1
    assert not ranks[0].is_running()
