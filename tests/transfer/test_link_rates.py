"""What a worker knows of its links before its first pull."""

from typing import Any, cast

import pytest
import torch

from common.config import TransferConfig
from common.wire_names import TRANSPORT_NUMBERS
from engine.pages.kv_cache import TorchKvStore
from engine.thread import EngineDriver
from kv_transfer import link_rates
from kv_transfer.link_rates import measure_link_rates
from kv_transfer.transports.grpc_chunks import GrpcChunks
from tests.engine.cuda_kv.support import make_shape

NO_ENGINE = cast(EngineDriver, None)  # handoffs are in the table; only cached blocks would be asked of an engine
SHM, GRPC = TRANSPORT_NUMBERS["shm"], TRANSPORT_NUMBERS["grpc"]


def make_store() -> TorchKvStore:
    return TorchKvStore(make_shape(dtype="float32"), 8, device=torch.device("cpu"))


async def measure(store: TorchKvStore) -> Any:
    return await measure_link_rates(TransferConfig(transports=("shm", "nixl", "grpc")), store, engine=NO_ENGINE)


async def test_transports_that_a_worker_may_use_are_measured_by_pulls_of_its_own_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_rates, "_MIN_BYTES", 1)
    store = make_store()
    for keys, values in store.layers:
        keys[:4], values[:4] = 1.0, 2.0
    rates = await measure(store)
    assert rates.keys() == {SHM, GRPC}
    assert all(rate > 0 for rate in rates.values())
    assert store.layers[0][0][7].eq(1.0).all(), "its pages travelled"


async def test_few_pages_tell_nothing_of_a_link() -> None:
    assert await measure(make_store()) == {}


async def test_transport_that_fails_is_left_out_and_the_worker_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(link_rates, "_MIN_BYTES", 1)
    monkeypatch.setattr(GrpcChunks, "offer", fail)
    assert (await measure(make_store())).keys() == {SHM}
    assert "cannot measure the link grpc: no such device; it is known after the first pulls" in caplog.text
