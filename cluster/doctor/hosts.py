"""Checks the hosts of a cluster.yaml over ssh, before `ray up` or later, for missing tools and for differences.

Ray reports little about either: an unsuitable host just never joins.
"""

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from cluster.doctor.finding import DoctorFinding, Health, failure, ok, warning
from cluster.doctor.host import VERSIONS
from common.config import ConfigError

_CONNECT_TIMEOUT_S = 5
_TIMEOUT_S = 60.0
_MAX_SKEW_S = 1.0
_ASK = """
echo "clock $(date +%s.%N)"
for tool in make rsync; do command -v "$tool" >/dev/null || echo "missing $tool"; done
{ command -v python3.11 || python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; } >/dev/null 2>&1 ||
  echo "missing Python 3.11"
timeout 3 bash -c '</dev/tcp/HEAD/6379' 2>/dev/null; [ $? = 124 ] && echo "blocked HEAD:6379"
cd ~/kvrelay 2>/dev/null && [ -x .venv/bin/kvrelay ] || exit 0
echo findings
.venv/bin/kvrelay doctor --host-only --json 2>/dev/null
exit 0
"""

Run = Callable[[Sequence[str]], Awaitable[tuple[int, str, str]]]
"""Runs a command; returns its exit status, stdout and stderr. Status 255 is a failure of ssh itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts to check, and how ssh reaches them."""

    head: str
    workers: tuple[str, ...]
    user: str
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The report of one host."""

    address: str
    findings: tuple[DoctorFinding, ...]
    versions: str = ""
    """Versions of kvrelay, Python and Ray; empty if kvrelay is not installed."""


def read_hosts(path: Path) -> Hosts:
    """Return the hosts of a cluster.yaml. Raises ConfigError, also for a cloud's file, which names no hosts."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        provider, auth = raw["provider"], raw["auth"]
        pools = provider.get("pools", {"all": provider.get("worker_ips", [])})
        return Hosts(
            head=str(provider["head_ip"]),
            workers=tuple(str(address) for addresses in pools.values() for address in addresses),
            user=str(auth["ssh_user"]),
            key=str(Path(auth["ssh_private_key"]).expanduser()) if "ssh_private_key" in auth else None,
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: names no hosts of your own: provider.head_ip and auth.ssh_user ({error})"
        ) from error


Which = Callable[[str], str | None]
"""Finds a program on this machine, like `shutil.which`."""


async def check_hosts(hosts: Hosts, run: Run, *, which: Which = shutil.which) -> list[DoctorFinding]:
    """Check all hosts concurrently; return findings about each and about their differences.

    Without ssh on this machine no host is checked.
    """
    missing = [tool for tool in ("ssh", "rsync") if which(tool) is None]
    here = []
    if missing:
        advice = "`ray up` uses ssh and rsync: install what is missing" + "; no host was checked" * ("ssh" in missing)
        here = [failure("this machine", f"{' and '.join(missing)} missing", advice)]
    if "ssh" in missing:
        return here
    reports = await asyncio.gather(*(_ask(address, hosts, run) for address in (hosts.head, *hosts.workers)))
    return [*here, *(finding for each in reports for finding in each.findings), *_differences(reports)]


async def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a command on this machine. After a minute it is killed and counts as a failure of ssh."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 255, "", f"no answer within {_TIMEOUT_S:g} s"
    return process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace")


async def _ask(address: str, hosts: Hosts, run: Run) -> _Report:
    settings = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_TIMEOUT_S}", "LogLevel=ERROR"]
    # Like `ray up`: hosts of a private network may be set up again with other keys.
    settings += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
    options = [part for setting in settings for part in ("-o", setting)]
    key = [] if hosts.key is None else ["-i", hosts.key]
    script = _ASK.replace("HEAD", hosts.head)
    started_s = time.time()
    status, stdout, stderr = await run(["ssh", *options, *key, "-l", hosts.user, "--", address, script])
    asked_s = (started_s + time.time()) / 2
    if status != 0:
        why = (stderr.strip().splitlines() or [f"exit status {status}"])[-1]
        advice = (
            "`ray up` cannot set it up: correct its address, auth.ssh_user and the key, start its sshd, open port 22"
        )
        return _Report(address=address, findings=(failure(address, f"no ssh as {hosts.user}: {why}", advice),))
    return _evaluate(address, stdout, asked_s=asked_s, slack_s=_MAX_SKEW_S + time.time() - started_s)


def _evaluate(address: str, stdout: str, *, asked_s: float, slack_s: float) -> _Report:
    facts, _, output = stdout.partition("findings\n")
    findings: list[DoctorFinding] = []
    for line in facts.splitlines():
        kind, _, value = line.partition(" ")
        match kind:
            case "missing":
                findings.append(failure(address, f"{value} missing", "install it there: `ray up` and kvrelay need it"))
            case "blocked":
                advice = "the host cannot join: open the ports of docs/hosts.md, “Ports”, between all hosts"
                findings.append(failure(address, f"no answer from {value}", advice))
            case "clock" if abs(skew_s := float(value) - asked_s) > slack_s:
                advice = "use NTP: logs cannot be put in order, and certificates may not be valid yet"
                text = f"its clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
                findings.append(warning(address, text, advice))
    own = _parse(output)
    versions = next((each.detail for each in own if each.subject == VERSIONS), "")
    if not versions:
        findings.append(
            warning(address, "no kvrelay, or its doctor fails", "`ray up` installs it; else run `kvrelay doctor` there")
        )
    findings += [replace(each, subject=f"{address}: {each.subject}") for each in own if each.verdict != Health.OK]
    if not findings:
        findings.append(ok(address, f"{versions}; no problem found"))
    return _Report(address=address, findings=tuple(findings), versions=versions)


def _parse(output: str) -> list[DoctorFinding]:
    """Return the findings that the doctor of another host printed; none if it did not run."""
    try:
        return [DoctorFinding(**each | {"verdict": Health(each["verdict"])}) for each in json.loads(output or "[]")]
    except (ValueError, TypeError, KeyError):
        return []


def _differences(reports: Sequence[_Report]) -> Iterator[DoctorFinding]:
    """Yield the hosts whose versions differ from those of most hosts."""
    found = {each.address: each.versions for each in reports if each.versions}
    if not found:
        return
    usual = Counter(found.values()).most_common(1)[0][0]
    if odd := [f"{address} has {versions}" for address, versions in found.items() if versions != usual]:
        advice = "Ray takes no host with another Python or Ray, and two kvrelays may not understand each other: install"
        yield failure("same versions", f"{', '.join(odd)}; most have {usual}", f"{advice} the same everywhere")
    elif len(found) > 1:
        yield ok("same versions", f"{usual} on {len(found)} hosts")
