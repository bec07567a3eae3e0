"""cluster.yaml and its variants pass the checks that `ray up` makes, and open the ports that docs/hosts.md names."""

import ipaddress
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import ROUTER_PORTS, parse_config
from tests.hosts.ports import documented_ports

_REPO = Path(__file__).parents[2]
_HEAD_ONLY = ("--port", "--ray-client-server-port")
_FILES = ("cluster.yaml", *sorted(f"deploy/{path.name}" for path in (_REPO / "deploy").glob("*.yaml")))


def load(file: str = "cluster.yaml") -> dict[str, Any]:
    loaded = yaml.safe_load((_REPO / file).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def check_with_ray(config: dict[str, Any]) -> dict[str, Any]:
    util = pytest.importorskip("ray.autoscaler._private.util")
    prepared = util.prepare_config(config)
    util.validate_config(prepared)
    assert isinstance(prepared, dict)
    return prepared


def test_cluster_yaml_passes_rays_own_validation_with_every_host() -> None:
    prepared = check_with_ray(load())

    (node_type,) = prepared["available_node_types"].values()
    assert node_type["max_workers"] == len(load()["provider"]["worker_ips"])


@pytest.mark.parametrize("file", _FILES)
def test_file_names_documentation_addresses_only(file: str) -> None:
    found = re.findall(r"\d+\.\d+\.\d+\.\d+", (_REPO / file).read_text(encoding="utf-8"))

    for address in found:
        assert ipaddress.ip_address(address) in ipaddress.ip_network("192.0.2.0/24") or address in (
            "127.0.0.1",
            "0.0.0.0",
        )


@pytest.mark.parametrize("file", [file for file in _FILES if file.startswith("deploy/")])
def test_autoscaler_sees_both_pools_with_labels_and_resources(file: str) -> None:
    pytest.importorskip("ray")
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    config = check_with_ray(load(file) | {"file_mounts": {}, "auth": {"ssh_user": "somebody"}})  # files of a person's
    types = AutoscalingConfig(config, skip_content_hash=True).get_node_type_configs()

    for pool in ("prefill", "decode"):
        assert types[pool].labels["pool"] == pool
        assert types[pool].resources["CPU"] > 0
        assert 0 < types[pool].min_worker_nodes <= types[pool].max_worker_nodes
    assert types["head"].resources["CPU"] == 0, "the head would get workers"


@pytest.mark.parametrize("file", _FILES)
def test_file_carries_sources_serving_yaml_and_token(file: str) -> None:
    config = load(file)

    assert config["file_mounts"]["~/kvrelay"] == "."
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("kvrelay up --config" in command for command in config["head_start_ray_commands"])


def ray_starts(config: dict[str, Any]) -> tuple[str, str]:
    """Return the commands that start Ray on the head and on the other hosts."""
    head, worker = (
        [command for command in config[f"{kind}_start_ray_commands"] if "ray start" in command]
        for kind in ("head", "worker")
    )
    return head[0], worker[0]


@pytest.mark.parametrize("file", _FILES)
def test_every_ray_asks_for_a_token_keeps_what_the_head_knows_and_waits_for_it(file: str) -> None:
    head, worker = ray_starts(load(file))

    assert "cluster.ray.keep_head" in head
    assert "RAY_gcs_storage=rocksdb" in head
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token" in command
        assert "RAY_gcs_rpc_server_reconnect_timeout_s=86400" in command


@pytest.mark.parametrize("file", _FILES)
def test_every_documented_port_of_rays_is_set_by_every_start_command(file: str) -> None:
    head, worker = ray_starts(load(file))
    for setting, ports in documented_ports().items():
        names = re.findall(r"`(--[a-z-]+|AUTOSCALER_[A-Z_]+)`", setting)
        for name, port in zip(names, (ports.start, ports.stop - 1), strict=False):
            set_to = re.compile(rf"(?<!\S){name}={port}(?!\d)")
            assert set_to.search(head), f"{file}: head: {name}"
            if name.startswith("--") and name not in _HEAD_ONLY:
                assert set_to.search(worker), f"{file}: worker: {name}"


def test_serving_yaml_of_the_document_is_valid_and_has_the_documented_ports() -> None:
    text = (_REPO / "docs" / "hosts.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(name: .*?)```", text, re.DOTALL)
    config, ports = parse_config(yaml.safe_load(block), source="docs/hosts.md"), documented_ports()

    assert config.pools.prefill.port_range == config.pools.decode.port_range == ports["`pools.*.ports`"]
    for key in ROUTER_PORTS:
        assert getattr(config.router, key) == ports[f"`router.{key}`"].start
    every = [port for each in ports.values() for port in each]
    assert len(every) == len(set(every)) > 300


def test_aws_hosts_are_what_aws_itself_takes() -> None:
    botocore = pytest.importorskip("botocore")
    from botocore import loaders, model, validate

    assert botocore.__version__
    service = model.ServiceModel(loaders.Loader().load_service_model("ec2", "service-2"))
    shape = service.operation_model("RunInstances").input_shape

    def problems(node_config: dict[str, Any]) -> str:
        request = {**node_config, "MinCount": 1, "MaxCount": 1}
        return str(validate.ParamValidator().validate(request, shape).generate_report())

    for node_type in load("deploy/aws.yaml")["available_node_types"].values():
        assert problems(node_type["node_config"]) == ""
    assert "NoSuchKey" in problems({"NoSuchKey": 1})
