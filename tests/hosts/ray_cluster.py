"""`ray up cluster.yaml` on test hosts: the file of this repository, with their addresses in it."""

import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from kvrelay.client import AsyncClient
from tests.hosts.network import SUBNET, Host

_REPO = Path(__file__).parents[2]
_VENV = Path(sys.prefix)
_NOT_SENT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
ROUTER_PORT = 50051
WORKER_PORTS = "21000-21199"
NAME = "hosts"
_CA = f"~/.cache/kvrelay/run/{NAME}/tls/ca.pem"
IDLE_TIMEOUT_S = 6.0
"""Idle time after which a typed host leaves."""
_UNTIL_RAY = "until {} pgrep -x raylet >/dev/null; do sleep 0.5; done"
_RAY_TIMEOUT_S = 120.0
_LOGS = (
    f"cat ~/kvrelay-up.log; tail -n 40 ~/.cache/kvrelay/run/{NAME}/logs/supervisor.log ~/kvrelay-head.log; "
    "cd /tmp/ray/session_latest/logs && tail -n 25 $(ls -t raylet*.out gcs_server*.out *agent*.log | head -n 6); "
    "ps -eo pid,ppid,etimes,stat,args | cut -c1-200"
)


class RayCluster:
    """A kvrelay cluster that `ray up` starts on hosts, the first of which is the head."""

    def __init__(
        self, hosts: Sequence[Host], *, file: str, serving: dict[str, Any], folder: Path, pools: dict[str, list[str]]
    ) -> None:
        """`file`: in this repository; `folder` gets what the client keeps: sources, token, configuration, state."""
        self.head = hosts[0]
        self._workers = hosts[1:]
        self._folder = folder
        self._file = _REPO / file
        self._pools = pools
        self._config = folder / "cluster.yaml"
        self._token = folder / "auth_token"
        self._token.write_text(secrets.token_hex(32), encoding="utf-8")
        self._token.chmod(0o600)
        sources = folder / "kvrelay"
        shutil.copytree(_REPO, sources, ignore=shutil.ignore_patterns(*_NOT_SENT))
        (sources / "serving.yaml").write_text(yaml.safe_dump(serving), encoding="utf-8")
        self._config.write_text(yaml.safe_dump(self._edited(sources)), encoding="utf-8")

    @property
    def address(self) -> str:
        """Address of the router, from outside."""
        return f"{self.head.address}:{ROUTER_PORT}"

    @property
    def ca(self) -> Path:
        """The client's copy of what the doors are known by; there once `fetch_ca` has run."""
        return self._folder / "ca.pem"

    def client(self, address: str = "", *, timeout_s: float = 120) -> AsyncClient:
        """Return a client of the router at an address, else of the head's, that trusts `ca`."""
        return AsyncClient(address or self.address, timeout_s=timeout_s, tls=self.ca)

    def fetch_ca(self) -> None:
        """Copy the certificate of the cluster's authority from the head, as a user would. It is there after `up`."""
        command = f"until [ -s {_CA} ]; do sleep 0.2; done; cat {_CA}"  # `kvrelay up` is still at it
        self.ca.write_text(self.head.run(command, timeout_s=120).stdout, encoding="ascii")

    def up(self) -> float:
        """Run `ray up` and return how long it took, seconds. Raises CalledProcessError."""
        return self._ray("up", "--yes", "--no-config-cache", str(self._config))

    def down(self) -> float:
        """Run what the file says for the end, and return how long it took, seconds."""
        started_s = time.monotonic()
        self._ray("exec", str(self._config), "kvrelay down --config ~/kvrelay/serving.yaml")
        self._ray("down", "--yes", str(self._config))
        running = [host for host in self._workers if host.is_on]
        with ThreadPoolExecutor(len(running)) as pool:
            list(pool.map(lambda host: host.run("~/kvrelay/.venv/bin/ray stop --grace-period 3"), running))
        return time.monotonic() - started_s

    def kvrelay(self, arguments: str, *, at: Host | None = None, exit_status: int = 0, environment: str = "") -> str:
        """Run a command of kvrelay's on the head or another host, and return what it says. Asserts its exit status."""
        command = f"cd ~/kvrelay && COLUMNS=150 {environment} .venv/bin/kvrelay {arguments}"
        done = (at or self.head).run(command, check=False, timeout_s=180)
        told = done.stdout + done.stderr
        assert done.returncode == exit_status, f"kvrelay {arguments}: exit {done.returncode}\n{told}"
        return told

    def doctor_of_hosts(self) -> str:
        """Have a doctor on the client's machine ask every host by ssh, and return what it says. It finds failures."""
        command = [sys.executable, "-m", "kvrelay", "doctor", "--hosts", str(self._config)]
        environment = os.environ | {"PYTHONPATH": str(_REPO), "COLUMNS": "150"}
        done = subprocess.run(
            command, cwd=_REPO, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 1, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def leftovers(self, host: Host) -> str:
        """Return the processes of a host that belong to Ray or to kvrelay, a line each."""
        listed = host.run("ps -eo pid,args").stdout.splitlines()
        ours = ("raylet", "gcs_server", "ray::", "cluster.owner", "kvrelay up", "monitor.py")
        return "\n".join(line for line in listed if any(name in line for name in ours))

    def _edited(self, sources: Path) -> dict[str, Any]:
        """Return cluster.yaml as a person would edit it, but for the installation: hosts reach no registry."""
        text = self._file.read_text(encoding="utf-8").replace("192.0.2", SUBNET)
        config: dict[str, Any] = yaml.safe_load(text)
        if config["provider"]["type"] == "local":
            config["provider"]["worker_ips"] = [host.address for host in self._workers]
        else:
            config["provider"]["pools"] = self._pools
            for pool in self._pools:
                config["available_node_types"][pool]["resources"] = {"CPU": os.cpu_count()}
            config["idle_timeout_minutes"] = IDLE_TIMEOUT_S / 60
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.head.state / "key")}
        config["file_mounts"] = {"~/kvrelay": str(sources), "~/.ray/auth_token": str(self._token)}
        install, *others = config["setup_commands"]
        assert install.startswith("cd ~/kvrelay && make install"), install
        python, packages = Path(sys.base_prefix) / "bin" / "python3", sysconfig.get_path("purelib")
        install = f"bash ~/kvrelay/tests/hosts/install.sh {python} {packages} {_VENV / 'bin'}"
        config["setup_commands"] = [install, *others]
        return config

    def _ray(self, *arguments: str) -> float:
        """Run a command of Ray's, in the way that cluster.yaml's comments tell."""
        environment = os.environ | {
            "RAY_UP_enable_autoscaler_v2": "0" if self._file.name == "cluster.yaml" else "1",
            "PYTHONPATH": str(_REPO),
            "KVRELAY_CACHE": str(self._folder / "cache"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._folder),
            "TMPDIR": str(self._folder),
        }
        started_s = time.monotonic()
        done = subprocess.run(
            [str(_VENV / "bin" / "ray"), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"ray {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}"
        return time.monotonic() - started_s


def runs_ray(host: Host) -> bool:
    """Return whether a raylet runs on a host."""
    return host.run("pgrep -x raylet", check=False).returncode == 0


def until_ray(host: Host, *, runs: bool) -> float:
    """Wait until Ray runs on a host, or no longer; return how long it took, seconds."""
    started_s = time.monotonic()
    host.run(_UNTIL_RAY.format("" if runs else "!"), timeout_s=_RAY_TIMEOUT_S)
    return time.monotonic() - started_s


def logs_of(head: Host) -> str:
    """Return the ends of the logs of a cluster's head, and its processes."""
    return head.run(_LOGS, check=False).stdout
