"""The pages for operators name the ports that are used."""

import re
from pathlib import Path

import pytest
import yaml

from common.config import ROUTER_PORTS, parse_config
from tests.hosts.ports import documented_ports

_REPO = Path(__file__).parents[2]
_PAGES = ("hosts", "security", "changes", "diagnosis", "reliability", "tracing")
_TEXT = "\n".join((_REPO / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in _PAGES)
_FILES = ("cluster.yaml", *sorted(f"deploy/{path.name}" for path in (_REPO / "deploy").glob("*.yaml")))
_HEAD_ONLY = ("--port", "--ray-client-server-port")


@pytest.mark.parametrize("file", _FILES)
def test_every_documented_port_of_rays_is_set_by_every_start_command(file: str) -> None:
    config = yaml.safe_load((_REPO / file).read_text(encoding="utf-8"))
    head, worker = (
        next(command for command in config[f"{kind}_start_ray_commands"] if "ray start" in command)
        for kind in ("head", "worker")
    )
    for setting, ports in documented_ports().items():
        names = re.findall(r"`(--[a-z-]+|AUTOSCALER_[A-Z_]+)`", setting)
        for name, port in zip(names, (ports.start, ports.stop - 1), strict=False):
            set_to = re.compile(rf"(?<!\S){name}={port}(?!\d)")
            assert set_to.search(head), f"{file}: head: {name}"
            if name.startswith("--") and name not in _HEAD_ONLY:
                assert set_to.search(worker), f"{file}: worker: {name}"


def test_serving_yaml_of_the_document_is_valid_and_has_the_documented_ports() -> None:
    (block,) = re.findall(r"```yaml\n(name: .*?)```", _TEXT, re.DOTALL)
    config, ports = parse_config(yaml.safe_load(block), source="docs/hosts.md"), documented_ports()

    assert config.pools.prefill.port_range == config.pools.decode.port_range == ports["`pools.*.ports`"]
    for key in ROUTER_PORTS:
        assert getattr(config.router, key) == ports[f"`router.{key}`"].start


def test_no_two_documented_ports_are_the_same() -> None:
    ports = [port for each in documented_ports().values() for port in each]

    assert len(ports) == len(set(ports)) > 300
