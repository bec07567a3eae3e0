"""The container file and the systemd unit: what they copy, open and run exists, and nothing runs as root."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.errors import EXIT_INTERRUPTED
from cli.main import app
from common.config import load_config
from common.ports import is_loopback
from kvrelay.packages import PACKAGES

_REPO = Path(__file__).parents[2]
_CONTAINER = _REPO / "deploy" / "container"
_UNIT = _REPO / "deploy" / "systemd" / "kvrelay.service"


def instructions() -> list[tuple[str, str]]:
    """Return the container file's instructions, each on one line."""
    text = re.sub(r"^#.*\n", "", (_CONTAINER / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, its FROM first; what comes before the first is left out."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def unit() -> dict[str, list[str]]:
    """Return the values of the unit's keys, of all its sections."""
    found: dict[str, list[str]] = {}
    for line in _UNIT.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def check_command(arguments: list[str]) -> None:
    """Fail unless a command of kvrelay exists, with its options."""
    known: Any = typer.main.get_command(app)
    name, *rest = arguments
    options = {option for parameter in known.commands[name].params for option in parameter.opts}
    assert {each for each in rest if each.startswith("-")} <= options


def test_image_builds_in_one_stage_and_serves_from_another_as_a_user_without_rights() -> None:
    build, serve = stages()
    assert ("COPY", "--from=build /opt/kvrelay /opt/kvrelay") in serve
    (user,) = [rest for word, rest in serve if word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes' runAsNonRoot needs numbers"
    words = [word for word, _ in serve]
    assert max(i for i, word in enumerate(words) if word == "RUN") < words.index("USER") < words.index("ENTRYPOINT")
    assert not [rest for word, rest in build if word in ("USER", "ENTRYPOINT")]


def test_image_gets_every_package_and_copies_only_files_that_exist_and_are_sent() -> None:
    copied = [
        source
        for stage in stages()
        for word, rest in stage
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert [source for source in copied if not (_REPO / source).exists()] == []
    assert {"kvrelay", *PACKAGES} <= set(copied)
    ignore = (_CONTAINER / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert sorted(line[1:] for line in ignore if line.startswith("!")) == sorted(copied)


def test_image_takes_only_the_files_that_its_locks_and_its_base_name() -> None:
    (base,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    installed = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert installed
    for command in installed:
        assert "--require-hashes" in command or command.endswith("--no-deps --no-build-isolation .")


@pytest.mark.parametrize(
    "lock", [*_REPO.glob("requirements*.lock"), *_REPO.glob(".ci/*.lock")], ids=lambda path: path.name
)
def test_lock_has_digests_for_every_version(lock: Path) -> None:
    for line in lock.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line), line[:60]


def test_what_builds_the_package_is_what_the_lock_has() -> None:
    (required,) = tomllib.loads((_REPO / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for lock in (".ci/tools.lock", ".ci/release.lock"):
        assert f"{required} " in (_REPO / lock).read_text(encoding="utf-8")


def test_image_opens_the_ports_of_its_configuration_and_runs_commands_that_exist() -> None:
    config = load_config(_CONTAINER / "serving.yaml")
    assert not is_loopback(config.router.host)
    assert config.tls.mode == "auto", "doors that other hosts reach are encrypted"
    assert config.router.auth == "api_key", "and ask for a key"
    said = dict(stages()[-1])
    assert set(map(int, said["EXPOSE"].split())) == {
        config.router.port,
        config.router.http_port,
        config.router.metrics_port,
    }
    for command in (said["CMD"], said["HEALTHCHECK"].partition("CMD ")[2]):
        words = [each for each in re.findall(r'"([^"]+)"', command) if each != "kvrelay"]
        check_command(words)
        assert words[-1] == "/etc/kvrelay/serving.yaml"
    assert ("COPY", "deploy/container/serving.yaml /etc/kvrelay/serving.yaml") in stages()[-1]


def test_unit_runs_an_existing_command_as_a_user_of_its_own_and_waits_for_its_drain() -> None:
    said = unit()
    _program, *arguments = shlex.split(said["ExecStart"][0])
    check_command(arguments)
    assert said["User"] == ["kvrelay"]
    assert said["NoNewPrivileges"] == ["yes"]
    assert said["CapabilityBoundingSet"] == [""]
    assert said["SuccessExitStatus"] == [str(EXIT_INTERRUPTED)], "a drained cluster has not failed"
    assert int(said["TimeoutStopSec"][0]) > load_config(_CONTAINER / "serving.yaml").pools.decode.drain_grace_s


def test_systemd_knows_every_key_of_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # Its program and its user are not on this machine.
    text = _UNIT.read_text(encoding="utf-8").replace("/opt/kvrelay/bin/kvrelay", "/bin/true")
    (tmp_path / _UNIT.name).write_text(re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    run = [analyze, "verify", "--man=no", str(tmp_path / _UNIT.name)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
