"""`kvrelay doctor --hosts` understands the report of each host and names their differences."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.doctor.finding import Finding, Verdict
from cluster.doctor.hosts import Hosts, check_hosts, read_hosts, run_command
from common.config import ConfigError

_REPO = Path(__file__).parents[2]
HOSTS = Hosts(head="192.0.2.10", workers=("192.0.2.11", "192.0.2.12"), user="somebody", key=None)


def answer(*lines: str, ray: str = "2.60.0", clock_s: float = 0.0, own: Sequence[dict[str, str]] = ()) -> str:
    versions = ("version Python 3.11.7", f"version Ray {ray}", "version kvrelay 0.1.0")
    return "\n".join((f"clock {time.time() + clock_s}", *lines, *versions, "findings", json.dumps(list(own))))


def has_everything(tool: str) -> str | None:
    return f"/usr/bin/{tool}"


async def asked(sick: tuple[int, str, str] | str) -> dict[str, Finding]:
    """Return the problems of three hosts, the last of which gives this answer."""

    async def run(command: Sequence[str]) -> tuple[int, str, str]:
        address = command[command.index("--") + 1]
        if address != HOSTS.workers[-1]:
            return 0, answer(), ""
        return (0, sick, "") if isinstance(sick, str) else sick

    found = await check_hosts(HOSTS, run, which=has_everything)
    return {each.subject: each for each in found if each.verdict is not Verdict.OK}


async def test_hosts_that_are_alike_have_only_good_findings() -> None:
    assert await asked(answer()) == {}


async def test_host_without_ssh_is_a_failure_with_sshs_own_reason() -> None:
    found = await asked((255, "", "somebody@192.0.2.12: Permission denied (publickey).\n"))

    assert found.keys() == {"192.0.2.12"}
    assert "Permission denied" in found["192.0.2.12"].detail


async def test_machine_without_ssh_is_a_failure_and_no_host_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    found = await check_hosts(HOSTS, run_command)

    assert [(each.subject, each.verdict) for each in found] == [("this machine", Verdict.FAILURE)]
    assert "ssh and rsync missing" in found[0].detail
    assert "no host was checked" in found[0].advice


async def test_machine_without_rsync_is_a_failure_and_hosts_are_checked() -> None:
    async def run(_command: Sequence[str]) -> tuple[int, str, str]:
        return 0, answer(), ""

    found = await check_hosts(HOSTS, run, which=lambda tool: None if tool == "rsync" else has_everything(tool))

    assert [each.subject for each in found if each.verdict is not Verdict.OK] == ["this machine"]
    assert {HOSTS.head, *HOSTS.workers} <= {each.subject for each in found}


async def test_host_with_another_ray_is_named() -> None:
    found = await asked(answer(ray="2.59.0"))

    assert found.keys() == {"same Ray"}
    assert "192.0.2.12 has 2.59.0" in found["same Ray"].detail


@pytest.mark.parametrize(
    ("line", "told"),
    [("missing rsync", "rsync missing"), ("blocked 192.0.2.10:1", "no answer from 192.0.2.10:1")],
)
async def test_host_with_a_missing_tool_or_without_a_way_to_the_head_is_a_failure(line: str, told: str) -> None:
    found = (await asked(answer(line)))["192.0.2.12"]

    assert found.verdict is Verdict.FAILURE
    assert told in found.detail


async def test_host_whose_clock_is_off_is_a_warning() -> None:
    assert "behind" in (await asked(answer(clock_s=-100.0)))["192.0.2.12"].detail


async def test_findings_of_a_hosts_own_doctor_are_passed_on_with_its_address() -> None:
    own = {"subject": "memory", "verdict": "warning", "detail": "only 0.5 GiB are free", "advice": "stop what runs"}

    assert (await asked(answer(own=[own])))["192.0.2.12: memory"].detail == "only 0.5 GiB are free"


async def test_host_without_kvrelay_is_a_warning() -> None:
    assert "`ray up` installs it" in (await asked(f"clock {time.time()}\n"))["192.0.2.12"].advice


@pytest.mark.parametrize(("file", "num_workers"), [("cluster.yaml", 2), ("deploy/on-premise.yaml", 3)])
def test_read_hosts_of_the_shipped_files_finds_every_host(file: str, num_workers: int) -> None:
    hosts = read_hosts(_REPO / file)

    assert (hosts.head, len(hosts.workers), hosts.user) == ("192.0.2.10", num_workers, "kvrelay")


def test_read_hosts_of_a_clouds_file_says_that_it_names_none() -> None:
    with pytest.raises(ConfigError, match="names no hosts of your own"):
        read_hosts(_REPO / "deploy" / "aws.yaml")
