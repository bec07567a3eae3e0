"""Hosts for tests on one machine: namespaces with an address, folders, processes and an ssh server of their own.

A host has its own network, mounts, processes, name and shared memory; cores, disk and kernel are the machine's. Its
home is a copy-on-write view of the machine's, everything under /tmp, /run and /dev/shm is its own, and nothing is
routed outside. Needs root, and the packages of `TOOLS`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = {"ip": "iproute2", "ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server", "rsync": "rsync"}
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Each process of pytest has a network of its own."""
SUBNET = f"10.77.{_NUMBER}"
FIRST_ADDRESS = 10
_NETWORK = f"kv{_NUMBER}"
_BRIDGE = f"{_NETWORK}-bridge"
_BOOT = Path(__file__).parent / "boot.sh"
_REPO = Path(__file__).parents[2]
_BOOT_TIMEOUT_S = 120.0


def why_not() -> str | None:
    """Return why there can be no hosts here, None when there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"needs the packages {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


@dataclass(slots=True)
class Host:
    """One host."""

    name: str
    address: str
    state: Path
    _init: "subprocess.Popen[bytes] | None" = field(default=None)

    def boot(self) -> None:
        """Switch it on; returns when its ssh server answers. Raises TimeoutError."""
        log = (self.state / f"{self.name}.log").open("ab")
        with log:
            namespaces = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--mount-proc")
            boot = ("bash", str(_BOOT), self.name, str(self.state), str(_REPO))
            self._init = subprocess.Popen(
                ["ip", "netns", "exec", self.device, "unshare", *namespaces, *boot],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _BOOT_TIMEOUT_S
        while self.run("true", check=False).returncode != 0:
            if time.monotonic() > deadline_s or self._init.poll() is not None:
                raise TimeoutError((self.state / f"{self.name}.log").read_text(encoding="utf-8", errors="replace"))
            time.sleep(0.1)

    def run(self, command: str, *, check: bool = True, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        """Run a command there, as root over ssh. Raises CalledProcessError."""
        settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=5")
        options = [part for setting in settings for part in ("-o", setting)]
        return subprocess.run(
            ["ssh", "-i", str(self.state / "key"), *options, f"root@{self.address}", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
        )

    def power_off(self) -> None:
        """Pull the plug: every process of the host is gone at once, without a word to its peers."""
        if self._init is None:
            return
        # unshare's child is the host's init; the kernel kills everything in its namespace with it.
        with suppress(ProcessLookupError):
            os.killpg(self._init.pid, signal.SIGKILL)
        self._init.wait()
        self._init = None

    @contextmanager
    def cut_off_from(self, other: "Host") -> Iterator[None]:
        """Drop what this host sends to another one, as a firewall between the two would; all others are reached."""
        route = ("-n", self.device, "route", "{}", "blackhole", f"{other.address}/32")
        _ip(*(part.format("add") for part in route))
        try:
            yield
        finally:
            _ip(*(part.format("del") for part in route))

    def listening_ports(self) -> set[int]:
        """Return the TCP ports that are listened on there, for other hosts or for itself."""
        listed = self.run("ss --listening --tcp --numeric --no-header").stdout.splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in listed}

    @property
    def device(self) -> str:
        """Name of its network namespace, and of the wire that leads there."""
        return f"{_NETWORK}-{self.name}"[:15]  # an interface's name has at most 15 characters

    @property
    def is_on(self) -> bool:
        """Whether it runs."""
        return self._init is not None and self._init.poll() is None


@contextmanager
def hosts(names: Sequence[str], folder: Path) -> Iterator[dict[str, Host]]:
    """Boot hosts on a network of their own; switches all off and takes the network down at the end."""
    _make_keys(folder)
    made = {
        name: Host(name=name, address=f"{SUBNET}.{FIRST_ADDRESS + position}", state=folder)
        for position, name in enumerate(names)
    }
    disks = folder / "disks"
    disks.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disks)], check=True)
    try:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for host in made.values():
            _connect(host, made)
        for host in made.values():
            host.boot()
        yield made
    finally:
        for host in made.values():
            host.power_off()
            _ip("link", "del", host.device, check=False)  # at once; a namespace goes when its last process has
            _ip("netns", "del", host.device, check=False)
            shutil.rmtree(_hosts_file(host).parent, ignore_errors=True)
        _ip("link", "del", _BRIDGE, check=False)
        subprocess.run(["umount", "--lazy", str(disks)], check=False)


def _connect(host: Host, everybody: dict[str, Host]) -> None:
    """Give a host its network: a wire to the bridge, an address, and the names of all."""
    _ip("netns", "add", host.device)
    _ip("link", "add", host.device, "type", "veth", "peer", "name", "eth0", "netns", host.device)
    _ip("link", "set", host.device, "master", _BRIDGE, "up")
    _ip("-n", host.device, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.device, "link", "set", "eth0", "up")
    _ip("-n", host.device, "link", "set", "lo", "up")
    names = ["127.0.0.1 localhost", *(f"{each.address} {each.name}" for each in everybody.values())]
    _hosts_file(host).parent.mkdir(parents=True, exist_ok=True)  # `ip netns exec` mounts it over /etc/hosts
    _hosts_file(host).write_text("\n".join(names) + "\n", encoding="utf-8")


def _hosts_file(host: Host) -> Path:
    return Path("/etc/netns") / host.device / "hosts"


def _make_keys(folder: Path) -> None:
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
            check=True,
            stdin=subprocess.DEVNULL,
        )


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check, stdin=subprocess.DEVNULL)


class Journal:
    """Writes a line for each step on stdout: seconds since its start, and the text."""

    def __init__(self, title: str) -> None:
        self._started_s = time.monotonic()
        _write(f"\n{title}")

    def note(self, text: str) -> None:
        """Write a step that is over; further lines of `text` are set in."""
        first, *others = text.splitlines()
        _write(f"{time.monotonic() - self._started_s:7.1f} s  {first}")
        for line in others:
            _write(" " * 11 + line.rstrip())


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
