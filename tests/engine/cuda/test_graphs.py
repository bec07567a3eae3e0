"""Batch sizes of graphs, and what happens where a graph cannot be captured."""

import logging
from pathlib import Path

import pytest

from engine.cuda.graphs import decode_sizes
from engine.device.devices import HostDevice
from tests.engine.driver import Driver, load, load_device, make_sequence
from tests.engine.tiny_models import make_prompt


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 20, 64, 100, 256, 1000])
def test_decode_sizes_end_at_the_maximum_and_pad_by_less_than_half(max_seqs: int) -> None:
    sizes = decode_sizes(max_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_seqs)
    for num_seqs in range(8, max_seqs):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < max(8, num_seqs / 2)


def test_decode_sizes_are_few_and_those_that_batches_have() -> None:
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]


def test_launch_when_graphs_cannot_be_captured_runs_without_and_says_why(
    qwen3: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: HostDevice, _run: object) -> None:
        raise RuntimeError("operation not permitted")

    prompts = [make_prompt(num, seed=num) for num in (5, 9, 2)]
    expected = Driver(load(qwen3)).generate([make_sequence(p) for p in prompts], num_tokens=6)
    for device in ("HostDevice", "CudaDevice"):
        monkeypatch.setattr(f"engine.device.devices.{device}.capture", fail)
    with caplog.at_level(logging.WARNING, logger="engine.cuda.graphs"):
        executor = load_device(qwen3)
    (record,) = (each for each in caplog.records if each.name == "engine.cuda.graphs")
    assert record.__dict__["reason"] == "operation not permitted"
    assert Driver(executor).generate([make_sequence(p) for p in prompts], num_tokens=6) == expected
