"""cluster.yaml passes the checks that `ray up` makes before it touches a machine."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest
import yaml

_PATH = Path(__file__).parents[2] / "cluster.yaml"


def load() -> dict[str, Any]:
    loaded = yaml.safe_load(_PATH.read_text(encoding="utf-8"))
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


def test_validation_refuses_an_unknown_key() -> None:
    """Shows that the check above can fail."""
    jsonschema = pytest.importorskip("jsonschema")

    with pytest.raises(jsonschema.ValidationError, match="no_such_key"):
        check_with_ray({**load(), "no_such_key": 1})


def test_cluster_yaml_names_documentation_addresses_only() -> None:
    provider = load()["provider"]

    for address in (provider["head_ip"], *provider["worker_ips"]):
        assert ipaddress.ip_address(address) in ipaddress.ip_network("192.0.2.0/24")


def test_cluster_yaml_starts_every_ray_with_token_authentication() -> None:
    config = load()
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]

    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
