"""`kvrelay doctor --hosts` understands the report of each host and names their differences."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.doctor.finding import DoctorFinding, Health
from cluster.doctor.host import VERSIONS
from cluster.doctor.hosts import Hosts, check_hosts, read_hosts, run_command
from common.config import ConfigError

_REPO = Path(__file__).parents[2]
HOSTS = Hosts(head="192.0.2.10", workers=("192.0.2.11", "192.0.2.12"), user="somebody", key=None)


def answer(*lines: str, ray: str = "2.60.0", own: Sequence[dict[str, str]] = ()) -> str:
    """Return the report of a host, without its clock."""
    versions = {"subject": VERSIONS, "verdict": "ok", "detail": f"kvrelay 0.1.0, Ray {ray}", "advice": ""}
    return "\n".join((*lines, "findings", json.dumps([versions, *own])))


def has_everything(tool: str) -> str | None:
    return f"/usr/bin/{tool}"


async def asked(sick: str, *, status: int = 0, stderr: str = "", clock_s: float = 0.0) -> dict[str, DoctorFinding]:
    """Return the problems of three hosts, the last of which gives this answer."""

    async def run(command: Sequence[str]) -> tuple[int, str, str]:
        address = command[command.index("--") + 1]
        if address != HOSTS.workers[-1]:
            return 0, f"clock {time.time()}\n{answer()}", ""
        return status, f"clock {time.time() + clock_s}\n{sick}", stderr

    found = await check_hosts(HOSTS, run, which=has_everything)
    return {each.subject: each for each in found if each.verdict is not Health.OK}


async def test_hosts_that_are_alike_have_only_good_findings() -> None:
    assert await asked(answer()) == {}


async def test_machine_without_ssh_is_a_failure_and_no_host_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    found = await check_hosts(HOSTS, run_command)

    assert [(each.subject, each.verdict) for each in found] == [("this machine", Health.FAILURE)]
    assert "ssh and rsync missing" in found[0].detail
    assert "no host was checked" in found[0].advice


async def test_machine_without_rsync_is_a_failure_and_hosts_are_checked() -> None:
    async def run(_command: Sequence[str]) -> tuple[int, str, str]:
        return 0, answer(), ""

    found = await check_hosts(HOSTS, run, which=lambda tool: None if tool == "rsync" else has_everything(tool))

    assert [each.subject for each in found if each.verdict is not Health.OK] == ["this machine"]
    assert {HOSTS.head, *HOSTS.workers} <= {each.subject for each in found}


_SICK = HOSTS.workers[-1]
_OWN = {"subject": "memory", "verdict": "warning", "detail": "only 0.5 GiB are free", "advice": "stop what runs"}


@pytest.mark.parametrize(
    ("report", "subject", "verdict", "text"),
    [
        ({"sick": "", "status": 255, "stderr": "Permission denied.\n"}, _SICK, Health.FAILURE, "Permission denied"),
        ({"sick": answer("missing rsync")}, _SICK, Health.FAILURE, "rsync missing"),
        ({"sick": answer("blocked 192.0.2.10:6379")}, _SICK, Health.FAILURE, "no answer from 192.0.2.10:6379"),
        ({"sick": answer(), "clock_s": -100.0}, _SICK, Health.WARNING, "s behind"),
        ({"sick": ""}, _SICK, Health.WARNING, "`ray up` installs it"),
        ({"sick": answer(ray="2.59.0")}, "same versions", Health.FAILURE, f"{_SICK} has kvrelay 0.1.0, Ray 2.59.0"),
        ({"sick": answer(own=[_OWN])}, f"{_SICK}: memory", Health.WARNING, "only 0.5 GiB are free"),
    ],
)
async def test_problem_of_one_host_is_the_only_finding(
    report: dict[str, Any], subject: str, verdict: Health, text: str
) -> None:
    found = await asked(**report)

    assert found.keys() == {subject}
    assert found[subject].verdict is verdict
    assert text in f"{found[subject].detail}; {found[subject].advice}"


@pytest.mark.parametrize(("file", "num_workers"), [("cluster.yaml", 2), ("deploy/on-premise.yaml", 3)])
def test_read_hosts_of_the_shipped_files_finds_every_host(file: str, num_workers: int) -> None:
    hosts = read_hosts(_REPO / file)

    assert (hosts.head, len(hosts.workers), hosts.user) == ("192.0.2.10", num_workers, "kvrelay")


def test_read_hosts_of_a_clouds_file_says_that_it_names_none() -> None:
    with pytest.raises(ConfigError, match="names no hosts of your own"):
        read_hosts(_REPO / "deploy" / "aws.yaml")
