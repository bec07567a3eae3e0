"""The share of memory that a worker may use."""

from pathlib import Path

import pytest

from common.clock import SystemClock
from common.config import ServingConfig
from engine.core import EngineCore
from engine.device.memory import NoRoomForPages
from worker.factory import drafting_bytes, limits_for, load_executor_for, memory_share, served_name, speculator_for


def make_config(*, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None) -> ServingConfig:
    return ServingConfig.model_validate({"pools": {"prefill": prefill or {}, "decode": decode or {}}})


@pytest.mark.parametrize(
    ("environ", "host_bytes", "host_fraction"),
    [
        ({"KVRELAY_MEMORY_BYTES": "12345"}, 12345, 1.0),
        ({"KVRELAY_NUM_CPUS": "2"}, None, 0.25),
        ({"KVRELAY_NUM_CPUS": "16"}, None, 1.0),
        ({}, None, 1.0),
    ],
    ids=["dealt by the launcher", "share of the cores", "more cores than there are", "started by hand"],
)
def test_memory_share_of_a_host_is_what_was_dealt_or_follows_the_cores(
    environ: dict[str, str], host_bytes: int | None, host_fraction: float
) -> None:
    config = make_config()
    share = memory_share(config, config.pools.decode, environ, cores=8)
    assert (share.host_bytes, share.host_fraction) == (host_bytes, host_fraction)


@pytest.mark.parametrize(
    ("prefill", "decode", "fraction"),
    [
        ({"num_gpus": 1}, {"num_gpus": 1}, 1.0),
        ({"num_gpus": 0.5}, {"num_gpus": 0.25}, 0.25),
        ({"count": 1}, {"count": 1}, 0.5),
        ({"count": 1}, {"count": 3}, 0.25),
        ({"num_gpus": 1}, {"count": 2}, 0.5),
        ({"count": 0}, {"count": 1}, 1.0),
    ],
)
def test_memory_share_of_a_device_is_reserved_or_an_equal_part_of_the_rest(
    prefill: dict[str, object], decode: dict[str, object], fraction: float
) -> None:
    config = make_config(prefill=prefill, decode=decode)
    assert memory_share(config, config.pools.decode, {}, cores=8).device_fraction == fraction


@pytest.mark.parametrize(("num_workers", "fraction"), [("1", 1.0), ("3", 1 / 3)])
def test_memory_share_of_a_dealt_device_is_divided_among_the_workers_on_it(num_workers: str, fraction: float) -> None:
    config = make_config(decode={"count": 4})
    share = memory_share(config, config.pools.decode, {"KVRELAY_GPU_WORKERS": num_workers}, cores=8)
    assert share.device_fraction == pytest.approx(fraction)


@pytest.mark.parametrize(("keys", "num_blocks"), [({}, 8192), ({"kv_memory_gib": 2**-20}, 8), ({"num_blocks": 5}, 5)])
def test_load_executor_for_the_fake_engine_has_the_pages_of_the_configuration(
    keys: dict[str, float], num_blocks: int
) -> None:
    config = ServingConfig.model_validate({"model": {"engine": "fake"}, "pools": {"decode": keys}})
    executor, _ = load_executor_for(config, config.pools.decode)
    assert executor.kv.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("name", "served"), [({}, "checkpoint"), ({"name": "acme/chat-large"}, "acme/chat-large")], ids=["folder", "named"]
)
def test_clients_ask_for_a_folder_by_its_own_name_or_the_configured_one(
    tmp_path: Path, name: dict[str, str], served: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = ServingConfig.model_validate({"model": {"id": str(folder), **name}})
    assert served_name(config.model, folder) == served


def test_memory_for_no_page_at_all_is_refused_by_the_keys_that_set_it() -> None:
    pool = {"kv_memory_gib": 1e-9}
    config = ServingConfig.model_validate({"model": {"engine": "fake"}, "pools": {"decode": pool, "prefill": pool}})
    executor, _tokenizer = load_executor_for(config, config.pools.decode)
    with pytest.raises(NoRoomForPages, match="pool of 0 KV blocks: raise num_blocks or kv_memory_gib"):
        EngineCore(executor, limits_for(config.pools.decode), SystemClock())


def test_speculation_that_an_executor_cannot_verify_is_off_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    on = ServingConfig.model_validate({"model": {"engine": "fake", "speculation": {"method": "ngram"}}})
    executor, _ = load_executor_for(on, on.pools.decode)
    assert speculator_for(make_config(), make_config().pools.decode, executor) is None
    assert speculator_for(on, on.pools.decode, executor) is not None
    assert not caplog.records
    executor.verifies_drafts = False
    assert speculator_for(on, on.pools.decode, executor) is None
    (record,) = caplog.records
    for reason in ("speculation is off", "compiled CPU kernels", "latent attention", "recurrent layers"):
        assert reason in record.getMessage()


def test_room_is_left_for_a_draft_model_in_decode_workers_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    sizes = (
        *(("draft", "torch", 1000 + 2**20), ("eagle", "torch", 1000 + 2**20)),
        *(("heads", "torch", 1000), ("draft", "vllm", 0)),
    )
    for method, engine, expected in sizes:
        speculation = {"method": method, "model": str(tmp_path), "kv_memory_gib": 2**-10}
        config = ServingConfig.model_validate({"model": {"engine": engine, "speculation": speculation}})
        assert drafting_bytes(config, config.pools.decode) == expected
        assert drafting_bytes(config, config.pools.prefill) == 0


def test_trees_of_drafts_are_refused_under_the_rejection_rule() -> None:
    speculation = {"method": "ngram", "rule": "rejection", "num_branches": 3}
    with pytest.raises(ValueError, match="cannot verify num_branches: 3 drafts by `rule: rejection`"):
        ServingConfig.model_validate({"model": {"speculation": speculation}})
    ServingConfig.model_validate({"model": {"speculation": speculation | {"num_branches": 1}}})


def test_draft_model_is_named_exactly_where_it_drafts() -> None:
    for speculation in ({"method": "draft"}, {"method": "eagle"}, {"method": "ngram", "model": "small"}):
        with pytest.raises(ValueError, match="need each other"):
            ServingConfig.model_validate({"model": {"speculation": speculation}})
