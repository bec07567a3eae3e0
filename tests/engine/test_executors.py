"""What every executor must hold about pages, whatever computes behind it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.kv_cache import TorchKvStore
from tests.engine.cuda.support import OverlapDriver, load_device
from tests.engine.tiny_models import Driver, load, make_prompt, make_sequence

NUM_TOKENS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An executor and what drives it."""

    load: Callable[[Path], Any]
    drive: Callable[[Any], Driver | OverlapDriver]


@pytest.fixture(
    params=[
        pytest.param(Kind(load=load, drive=Driver), id="runner"),
        pytest.param(Kind(load=load_device, drive=OverlapDriver), id="device"),
    ]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def test_generate_when_prefix_pages_are_shared_answers_the_same(kind: Kind, qwen3: Path) -> None:
    driver = kind.drive(kind.load(qwen3))
    first = make_sequence(make_prompt(21))
    (expected,) = driver.generate([first], num_tokens=NUM_TOKENS)
    second = make_sequence(make_prompt(21))
    second.block_table = first.block_table[:5]
    second.num_computed = 20
    assert driver.generate([second], num_tokens=NUM_TOKENS) == [expected]


def test_generate_when_pages_moved_from_the_cpus_executor_answers_the_same(kind: Kind, qwen3: Path) -> None:
    source, target = load(qwen3), kind.load(qwen3)
    assert source.kv.shape == target.kv.shape
    sequence = make_sequence(make_prompt(22))
    driver = Driver(source)
    driver.generate([sequence], num_tokens=5)
    (expected,) = driver.generate([sequence], num_tokens=NUM_TOKENS)
    moved = make_sequence(make_prompt(22))
    for token_id in expected[:5]:
        moved.append_token(token_id)
    moved.num_computed = 26
    moved.block_table = array("i", (9, 3, 77, 0, 5, 21, 8))
    target.kv.write_blocks(moved.block_ids(), source.kv.read_blocks(sequence.block_ids()[:7]))
    other = kind.drive(target)
    other.free = [block_id for block_id in other.free if block_id not in moved.block_table]
    assert other.generate([moved], num_tokens=NUM_TOKENS) == [expected]


def test_generate_when_pages_hold_nan_of_another_request_answers_the_same(kind: Kind, mixed_windows: Path) -> None:
    clean, dirty = kind.load(mixed_windows), kind.load(mixed_windows)
    assert isinstance(dirty.kv, TorchKvStore)
    for pages in dirty.kv.layers:
        for page in pages:
            page.fill_(float("nan"))
    prompts = [make_prompt(num, seed=num) for num in (1, 6, 8, 30)]
    answers = [
        kind.drive(executor).generate([make_sequence(p) for p in prompts], num_tokens=NUM_TOKENS, chunk_size=5)
        for executor in (clean, dirty)
    ]
    assert answers[0] == answers[1]
