"""serving.yaml: every mistake is reported as file:key: reason, and the documents list every key."""

from pathlib import Path

import pytest

from common.config import ConfigError, load_config, parse_config
from common.config.keys import needs_of
from common.config.tables import write_tables
from common.config.workers import ModelConfig

_REPO = Path(__file__).parents[2]

MISTAKES = {
    "nonsense: 1": "f.yaml:nonsense: unknown key",
    "pools: {prefill: {blocksize: 3}}": "f.yaml:pools.prefill.blocksize: unknown key; did you mean block_size?",
    "model: {tensor_parallel: 3}": (
        "f.yaml:model.tensor_parallel: unknown key; did you mean"
        " pools.prefill.tensor_parallel or pools.decode.tensor_parallel?"
    ),
    "queue_timeout_s: 3": "f.yaml:queue_timeout_s: unknown key; did you mean router.queue_timeout_s?",
    "tenants: [{name: a, wait: 3}]": "f.yaml:tenants.0.wait: unknown key; did you mean weight?",
    "pools: {decode: {block_size: 32}}": "pools.decode.block_size: 32 does not match pools.prefill.block_size: 16",
    "pools: {decode: {count: 0}}": "pools.decode.count: 0",
    "pools: {decode: {max_step_tokens: 8}}": "pools.decode.max_running: 64",
    "transfer: {transports: []}": "transfer.transports: empty",
    "transfer: {transports: [rdma]}": "f.yaml:transfer.transports.0: ",
    "pools: {decode: {kv_memory_gib: 0}}": "f.yaml:pools.decode.kv_memory_gib: Input should be greater than 0",
    "pools: {decode: {kv_memory_gib: much}}": "f.yaml:pools.decode.kv_memory_gib: Input should be 'auto'",
    "pools: {decode: {ports: 21000}}": "f.yaml:pools.decode.ports: ",
    "pools: {decode: {ports: 21000-20000}}": "f.yaml:pools.decode: ports: 21000-20000 is not a range of ports",
    "pools: {decode: {ports: 60000-70000}}": "f.yaml:pools.decode: ports: 60000-70000 is not a range of ports",
    "router: {port: 70000}": "f.yaml:router.port: ",
    "router: {port: 8000, http_port: 8000}": "router.http_port: 8000 is already router.port",
    "router: {count: 3, port: 8000, http_port: 8002}": "router.port of router-2: 8002 is already router.http_port",
    "router: {count: 2, port: 65535}": "router.port of router-1: 65536 is not a port",
    "router: {count: 0}": "f.yaml:router.count: ",
    "model: {dtype: int3}": "f.yaml:model.dtype: ",
    "model: {engine: vllm, kv_dtype: int8}": "model.kv_dtype: int8: model.engine: vllm cannot do that",
    "model: {engine: vllm, quantization: int4}": "model.quantization: int4: model.engine: vllm cannot do that",
    "model: {kernels: compile}": "model.kernels: compile: model.engine: torch cannot do that; model.engine: vllm can",
    "model: {vllm: {seed: 1}}": "model.vllm: only model.engine: vllm takes vLLM's arguments",
    "pools: {decode: {num_gpus: 2}}": "pools.decode.num_gpus: 2: a worker computes on one GPU for each of its",
    "{model: {engine: vllm}, pools: {prefill: {num_gpus: 4, tensor_parallel: 2}}}": "the others would be idle",
    "{model: {engine: fake}, pools: {prefill: {tensor_parallel: 2}}}": "tensor_parallel: 2: model.engine: fake cannot",
    "{model: {engine: vllm}, pools: {prefill: {block_size: 16}, decode: {block_size: 16}}}": "needs a multiple of 32",
    "tenants: [{name: Big}]": "f.yaml:tenants.0.name: ",
    "tenants: [{name: a}]": "f.yaml:tenants: without router.auth: api_key the only tenant is `default`",
    "tenants: [{name: default, api_keys: [0123456789abcdef]}]": "the only tenant is `default`, and it has no keys",
    "router: {auth: api_key}": "router.auth: api_key, but no tenants have keys",
    "{router: {auth: api_key}, tenants: [{name: a}]}": "tenants: a has neither api_keys nor api_key_sha256",
    "{router: {auth: api_key}, tenants: [{name: a}, {name: a}]}": "tenants: a is listed twice",
    "{tenants: [{name: default, api_key_sha256: [abc]}]}": "f.yaml:tenants.0.api_key_sha256.0: ",
    "router: {salt_secret: short}": "f.yaml:router.salt_secret: ",
    "tls: {mode: files}": "f.yaml:tls: certificate and key belong to mode: files",
    "tls: {insecure: true}": "f.yaml:tls: insecure belongs to mode: off",
    "tls: {names: [no name]}": "f.yaml:tls.names.0: ",
    "tls: {names: [worker.mine.kvrelay.internal]}": "f.yaml:tls: names: worker.mine.kvrelay.internal is a name of",
    "tiers: {disk_gib: 1}": "f.yaml:tiers: path: missing",
    "tiers: {disk_gib: 1, path: kv}": "f.yaml:tiers: path: 'kv' is relative",
    "tiers: {disk_gib: 1, path: ''}": "f.yaml:tiers: path: '.' is relative",
    "tiers: {disk_gib: 1, path: ~nobody/kv}": "f.yaml:tiers: path: '~nobody/kv' is relative",
    "tiers: {host_gib: .inf}": "f.yaml:tiers.host_gib: Input should be a finite number",
    "tiers: {disk_gib: .nan, path: /kv}": "f.yaml:tiers.disk_gib: Input should be",
    "{tls: {mode: off}, router: {host: 0.0.0.0}}": "tls.mode: off, but other hosts reach router.host: 0.0.0.0",
    "[1, 2]": "f.yaml: must be a mapping",
    "a: [": "f.yaml: not YAML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistake_in_the_file_is_reported_with_key_and_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert MISTAKES[text] in str(caught.value)


def test_two_mistakes_are_both_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"nonsense": 1, "router": {"port": -1}}, source="f.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_second_router_listens_on_the_next_ports_and_free_ones_stay_free() -> None:
    config = parse_config({"router": {"count": 2, "port": 7000, "http_port": None, "metrics_port": 0}}, source="f.yaml")
    second = config.for_router(1).router
    assert (second.port, second.http_port, second.metrics_port) == (7001, None, 0)


def test_shipped_file_and_an_empty_one_are_valid(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("", encoding="utf-8")
    assert load_config(empty).router.port == 50051
    assert load_config(_REPO / "serving.yaml").name == "kvrelay"


def test_on_and_off_need_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("{tls: {mode: on}, planner: {mode: off}}", encoding="utf-8")

    config = load_config(path)

    assert (config.tls.mode, config.planner.mode) == ("on", "off")


def test_pools_of_vllms_engine_have_blocks_that_it_takes_where_the_file_names_none() -> None:
    config = parse_config({"model": {"engine": "vllm"}, "pools": {"prefill": {"tensor_parallel": 3}}}, source="f.yaml")

    assert (config.pools.prefill.block_size, config.pools.decode.block_size) == (32, 32)


@pytest.mark.parametrize(("document", "num_tables"), [("serving.md", 13), ("changes.md", 1), ("engines.md", 1)])
def test_documents_list_every_key_with_its_default_need_and_meaning(document: str, num_tables: int) -> None:
    text = (_REPO / "docs" / document).read_text(encoding="utf-8")

    assert text.count("<!-- table: ") == num_tables
    assert write_tables(text) == text, "the tables are out of date; run `make tables`"


def test_key_that_declares_no_need_is_refused_by_name() -> None:
    class Grown(ModelConfig):
        flavour: str = "plain"

    with pytest.raises(ValueError, match="flavour declares 0 needs"):
        needs_of(Grown())
