"""The pages for operators name existing commands and ports."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cli.main import app
from common.config import ROUTER_PORTS, parse_config
from tests.hosts.ports import documented_ports

_REPO = Path(__file__).parents[2]
_PAGES = ("hosts", "security", "changes", "diagnosis", "reliability", "tracing")
_TEXT = "\n".join((_REPO / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in _PAGES)
_FILES = ("cluster.yaml", *sorted(f"deploy/{path.name}" for path in (_REPO / "deploy").glob("*.yaml")))
_CODE = re.compile(r"```[^`\n]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
_COMMAND = re.compile(r"(?:^|[\s/'\"])kvrelay (?!@)([a-z][a-z-]*)((?: [^\n'&|;#)]*)?)")
_HEAD_ONLY = ("--port", "--ray-client-server-port")


def commands() -> set[tuple[str, str]]:
    """Return every command of kvrelay's in the pages' code, with what follows it."""
    code = "\n".join(block or span for block, span in _CODE.findall(_TEXT))
    return set(_COMMAND.findall(code.replace("\\\n", " ")))


def test_every_command_and_option_in_the_pages_exists() -> None:
    known: Any = typer.main.get_command(app)
    found = commands()

    assert {"up", "down", "status", "scale", "restart", "doctor", "logs", "generate"} <= {name for name, _ in found}
    for name, rest in found:
        assert name in known.commands, f"kvrelay {name}"
        options = {option for parameter in known.commands[name].params for option in parameter.opts}
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest):
            assert option in options, f"kvrelay {name} {option}"


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
