"""Several ranks: processes that have a part of a model each, against one process that has all of it."""

import fcntl
import gc
import os
import queue
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from common.ids import BlockId
from common.model_files import default_model_dir
from common.process import CannotStart
from common.sampling import SamplingParams
from engine.executor import DeviceBroken, Executor
from engine.ops.cpu.build import NotBuilt, find_compiler
from engine.ops.select import cpu_runs_kernels
from engine.ranks.decoder import RankPart
from engine.runner import KeptStates
from engine.sequence import Sequence
from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config, read_json
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.segments import num_segments, possible_ranks
from tests.engine.driver import GREEDY, Driver, load, make_sequence
from tests.engine.tiny_models import make_model, make_prompt

SIZES = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 12, "head_dim": 32}
BLOCK_SIZE, NUM_TOKENS = 16, 12
_DEADLINE_S = 60


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    if isinstance(compiler := find_compiler(), NotBuilt):
        pytest.skip(compiler.reason)
    if not cpu_runs_kernels():
        pytest.skip("this CPU's registers are too small for compiled kernels")


def save(folder: Path, name: str, **sizes: Any) -> Path:
    make_model(name, **SIZES | sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=4)


def sequences() -> list[Sequence]:
    """Return sequences that are decoded greedily and by chance, one with log-probabilities of its prompt."""
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=64)
    given = (GREEDY, drawn, replace(drawn, repetition_penalty=1.3), replace(GREEDY, num_prompt_logprobs=2))
    return [
        make_sequence(make_prompt(30 + 7 * i, seed=i), sampling=sampling, block_size=BLOCK_SIZE)
        for i, sampling in enumerate(given)
    ]


def answer(folder: Path, num_ranks: int, **options: Any) -> tuple[list[list[int]], list[bytes]]:
    """Return the answers to some prompts, in chunks and batches of several sizes, and the bytes of their pages."""
    executor = load(folder, tensor_parallel=num_ranks, block_size=BLOCK_SIZE, **options)
    asked = sequences()
    answers = Driver(executor).generate(asked, num_tokens=NUM_TOKENS, chunk_size=20)
    return answers, [pages_of(executor, each) for each in asked]


def pages_of(executor: Executor, sequence: Sequence) -> bytes:
    """Return the bytes of a sequence's full pages."""
    full = sequence.block_table[: sequence.num_computed // BLOCK_SIZE]
    return bytes(executor.kv.read_blocks([*map(BlockId, full)]))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "sizes", "options", "num_ranks"),
    [
        ("llama", {"num_key_value_heads": 4}, {}, 2),
        ("llama-tied", {"num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}, {}, 3),
        # a key head that two ranks have
        ("qwen3", {"num_key_value_heads": 2}, {"dtype": "bfloat16"}, 4),
        ("qwen2", {"num_key_value_heads": 4, "hidden_size": 384}, {"kv_dtype": "int8"}, 2),
        (
            "qwen3_moe-window",
            {"num_key_value_heads": 6, "num_experts": 6, "moe_intermediate_size": 384},
            {"dtype": "bfloat16"},
            3,
        ),
        (
            "qwen2_moe",
            {"num_key_value_heads": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
            {"kv_dtype": "int4"},
            2,
        ),
        # layers with pages of their own
        ("gemma3", {"num_key_value_heads": 4, "sliding_window": 24}, {"max_model_len": 128}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_number_of_ranks_gives_the_answers_and_the_pages_of_one(
    tmp_path: Path, name: str, sizes: dict[str, Any], options: dict[str, Any], num_ranks: int
) -> None:
    save(tmp_path, name, **sizes)
    assert answer(tmp_path, num_ranks, **options) == answer(tmp_path, 1, **options)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.model
def test_real_model_in_three_ranks_gives_the_answers_and_the_pages_of_one() -> None:
    assert answer(default_model_dir(), 3, dtype="bfloat16") == answer(default_model_dir(), 1, dtype="bfloat16")


@pytest.mark.usefixtures("forked_ranks")
def test_states_and_logits_for_drafts_are_those_of_one_process(llama: Path) -> None:
    states, logits = [], []
    for num_ranks in (1, 2):
        executor = load(llama, tensor_parallel=num_ranks, dtype="bfloat16")
        executor.kept_states = KeptStates(num_tokens=5, layers=(1, 2))
        [result] = Driver(executor).step([(make_sequence(make_prompt(20)), 20)])
        assert result.states is not None
        states.append(result.states)
        logits.append(executor.logits_of(torch.from_numpy(result.states[:, :192].copy())))
    assert states[0].shape == (5, 2 * 192)
    assert np.array_equal(states[0], states[1])
    assert torch.equal(logits[0], logits[1])


@pytest.mark.usefixtures("forked_ranks")
def test_a_prompt_of_two_ranks_is_continued_by_one_and_resumed_by_four(llama: Path) -> None:
    prompt = make_prompt(3 * BLOCK_SIZE, seed=3)
    expected = make_sequence([*prompt, 1], block_size=BLOCK_SIZE)
    one = load(llama, block_size=BLOCK_SIZE)
    [answer] = Driver(one).generate([expected], num_tokens=2 * BLOCK_SIZE)
    found: list[int] = []
    known, pages, num_blocks = [*prompt, 1], b"", 0
    for num_ranks in (2, 1, 4):
        executor = load(llama, tensor_parallel=num_ranks, block_size=BLOCK_SIZE)
        assert executor.kv.shape == one.kv.shape
        driver, sequence = Driver(executor, seed=num_ranks), make_sequence(known, block_size=BLOCK_SIZE)
        held = [driver.free.pop() for _ in range(num_blocks)]
        if held:
            executor.kv.write_blocks(held, memoryview(pages))
        sequence.block_table.extend(held)
        sequence.num_computed = num_blocks * BLOCK_SIZE
        [found_here] = driver.generate([sequence], num_tokens=10)
        found += found_here
        known += found_here
        num_blocks = sequence.num_computed // BLOCK_SIZE
        pages = pages_of(executor, sequence)
    assert found == answer[: len(found)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [1, 2, 4, 12]),
        ({"num_key_value_heads": 3}, [1, 3, 6, 12]),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, [1, 3]),
        ({"intermediate_size": 74}, [1]),
    ],
)
def test_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(
    tmp_path: Path, sizes: dict[str, int], expected: list[int]
) -> None:
    config = read_config(save(tmp_path, "llama", **{"num_key_value_heads": 4, **sizes}))
    assert possible_ranks(config) == expected
    assert num_segments(config) == expected[-1]
    with pytest.raises(UnsupportedModel, match=f"among 5 ranks: .* allow {', '.join(map(str, expected))}"):
        load(tmp_path, tensor_parallel=5)


def read_config(folder: Path) -> DecoderConfig:
    return parse_config(read_json(folder / "config.json"))


def test_ranks_of_quantized_weights_are_refused(llama: Path) -> None:
    with pytest.raises(UnsupportedModel, match="quantized weights"):
        load(llama, tensor_parallel=2, quantization="int8")


def test_ranks_end_when_their_engine_does_and_the_log_names_number_and_kernels(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        executor = load(llama, tensor_parallel=2)
    chosen, loaded = (vars(each) for each in caplog.records if each.message in ("kernels chosen", "model loaded"))
    assert (chosen["operations"], chosen["linears"][:8]) == ("compiled for this CPU", "compiled")
    assert loaded["num_ranks"] == 2
    assert executor.floors is not None
    assert executor.floors.kv_bytes_per_token == executor.kv.shape.bytes_per_token // 2
    [rank] = ranks_here()
    del executor
    assert not rank.is_running()


def test_a_step_that_fails_in_one_rank_ends_the_engine_before_a_wrong_token(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ranks.leader.end_without", Mock())
    executor = load(llama, tensor_parallel=2)
    driver, asked = Driver(executor), make_sequence(make_prompt(20))
    driver.step([(asked, 20)])

    def embed(*_args: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(DecoderWeights, "embed", embed)
    with pytest.raises(DeviceBroken, match="in one of several ranks: can't allocate memory"):
        driver.step([(asked, 1)])
    [rank] = ranks_here()
    rank.kill()  # it waits inside of the step
    del driver, executor
    gc.collect()  # the error's frames
    assert not rank.is_running()


def ranks_here() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.ranks.follower" in child.cmdline()]


def test_a_system_that_cannot_watch_ranks_gets_an_error_and_does_not_hang(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError("Function not implemented")), raising=False)
    with pytest.raises(OSError, match="Function not implemented"):
        load(llama, tensor_parallel=4)
    assert ranks_here() == []


def test_a_rank_that_ends_is_named_with_its_end_whatever_files_are_open(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pidfd_open, losses = os.pidfd_open, queue.Queue[str]()
    past_select = 1100  # select() takes none from 1024 on
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    monkeypatch.setattr(os, "pidfd_open", lambda pid: fcntl.fcntl(pidfd_open(pid), fcntl.F_DUPFD_CLOEXEC, past_select))
    monkeypatch.setattr("engine.ranks.leader.end_without", losses.put)
    executor = load(llama, tensor_parallel=4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    rank = ranks_here()[-1]
    rank.kill()
    assert losses.get(timeout=_DEADLINE_S) == f"rank 3 (process {rank.pid}) has ended: killed by SIGKILL"
    del executor


def test_a_rank_that_is_killed_while_it_loads_fails_the_start_by_name(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_part = RankPart.load

    def load_and_kill(*args: Any) -> RankPart:
        ranks_here()[1].kill()
        return load_part(*args)

    monkeypatch.setattr(RankPart, "load", load_and_kill)
    with pytest.raises(CannotStart, match=r"rank 2 \(process \d+\) has ended: killed by SIGKILL, while it loaded"):
        load(llama, tensor_parallel=4)
    assert ranks_here() == []


STARTS_A_RANK = """
import os, subprocess, sys
environment = {**os.environ, "KVRELAY_PARENT_PID": str(os.getpid())}
rank = [sys.executable, "-P", "-m", "engine.ranks", "engine.ranks.follower", "0", "0"]
with subprocess.Popen(rank, env=environment) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def test_a_rank_ends_with_the_first_one_while_it_imports_torch(tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    os.mkfifo(imports)
    (tmp_path / "torch.py").write_text(f"import time; open({str(imports)!r}, 'w').close(); time.sleep(600)")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command, environment = [sys.executable, "-c", STARTS_A_RANK], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as first:
        assert first.stdout is not None
        rank = psutil.Process(int(first.stdout.readline()))
        imports.read_bytes()  # waits for the import
        first.kill()
        _, alive = psutil.wait_procs([rank], _DEADLINE_S)
    for each in alive:
        each.kill()
    assert not alive


SERVE = """
import sys
from pathlib import Path
from tests.engine.driver import Driver, load, make_sequence
executor = load(Path(sys.argv[1]), tensor_parallel=int(sys.argv[2]), kernels=sys.argv[3])
while True:
    Driver(executor).generate([make_sequence(range(1, 20))], num_tokens=30)
    print("an answer", flush=True)
"""


def shared_names() -> set[str]:
    """Return what is in shared memory, but for the semaphores that tests in other processes make and unlink at once."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.parametrize("victim", ["other", "first, while another is stopped"])
def test_sigkill_of_a_rank_in_the_middle_of_a_step_ends_all_of_them(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-c", SERVE, str(save(tmp_path, "llama", num_key_value_heads=3)), "3", "auto"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as served:
        assert served.stdout is not None and served.stdout.readline() == b"an answer\n"
        ranks = psutil.Process(served.pid).children()
        assert len(ranks) == 2
        before = shared_names()
        if victim != "other":
            os.kill(ranks[1].pid, signal.SIGSTOP)
        os.kill(ranks[0].pid if victim == "other" else served.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, _DEADLINE_S)
        assert served.wait(_DEADLINE_S) == (70 if victim == "other" else -signal.SIGKILL)
    assert not alive
    assert shared_names() <= before
