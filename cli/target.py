"""The cluster that a command means: the file names it, its run folder says where it is and how to connect."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, AddressOption, ApiKeyOption, CaOption, ConfigOption

if TYPE_CHECKING:
    from cluster.lifecycle import ClusterInfo
    from kvrelay.client import Client

_DEFAULT_NAME = "kvrelay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTarget:
    """A cluster to connect to."""

    address: str
    """Addresses of its routers, with commas between them."""
    tls: bool | str | None
    """TLS setting, in the form of `kvrelay.client.tls.Tls`."""
    operator_proof: str | None
    """Proof that the caller is an operator of this host; None for a cluster named by its address."""
    trouble: str = ""
    """Why its controller does not supervise it, as its run folder on this host says."""

    def client_options(self, api_key: str | None) -> dict[str, Any]:
        """Return what a client of it is made with, besides its addresses; without a key it is an operator's."""
        return {"tls": self.tls, "api_key": api_key or self.operator_proof}


def run_dir_of(config_path: Path) -> Path:
    """Return the run folder of the cluster that `config_path` names. Raises ConfigError.

    Without a file at the default place it is the folder of the default name: `status` works from any directory. The
    rest of the file may be wrong: a cluster that runs can be looked at and ended while its file is edited.
    """
    from cluster.lifecycle import default_run_dir

    if config_path == DEFAULT_CONFIG and not config_path.exists():
        return default_run_dir(_DEFAULT_NAME)
    from common.config import name_in

    return default_run_dir(name_in(config_path))


def running_cluster(config_path: Path) -> "ClusterInfo":
    """Return the cluster that a configuration file names. Raises CliError when it does not run."""
    from cluster.lifecycle import read_info

    info = read_info(run_dir_of(config_path))
    if info is None:
        raise CliError(_not_running(config_path))
    if info.trouble:
        raise CliError(f"the controller does not supervise the cluster yet: {info.trouble}")
    return info


def find_cluster(address: str | None, ca: Path | None, config_path: Path) -> ClusterTarget:
    """Return the cluster at the address given, else the one that the file names.

    `ca` vouches for its doors; without it the run folder's own, or what the environment says. Raises ConfigError, and
    CliError when the file's cluster does not run: another program may listen in its place, and gets no key or prompt.
    """
    tls = None if ca is None else str(ca)
    if address is not None:
        return ClusterTarget(address=address, tls=tls, operator_proof=None)
    from cluster.lifecycle import read_info
    from cluster.trust import operator_proof

    info = read_info(run_dir_of(config_path))
    if info is None:
        raise CliError(f"{_not_running(config_path)}, or name a router with --address HOST:PORT (bench: --target URL)")
    return ClusterTarget(
        address=info.address,
        tls=info.tls if ca is None else tls,
        operator_proof=operator_proof(info.run_dir),
        trouble=info.trouble,
    )


def others_running() -> str:
    """Return the clusters that run on this host, as the end of a message; empty when there are none."""
    from cluster.lifecycle import running_names

    names = running_names()
    return f"; running here: {', '.join(names)} (name its file with --config)" if names else ""


def _not_running(config_path: Path) -> str:
    option = "" if config_path == DEFAULT_CONFIG else f" --config {config_path}"
    return f"no cluster is running for {config_path}: start it with `kvrelay up{option}`{others_running()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options that name a cluster, and its caller."""

    address: AddressOption = None
    ca: CaOption = None
    api_key: ApiKeyOption = None
    config_path: ConfigOption = DEFAULT_CONFIG

    def cluster(self) -> ClusterTarget:
        """Return the cluster. Raises ConfigError and CliError."""
        return find_cluster(self.address, self.ca, self.config_path)

    def client(self, **options: Any) -> "Client":
        """Return a client of the cluster; the caller closes it. Raises ConfigError and CliError."""
        from kvrelay.client import Client

        cluster = self.cluster()
        return Client(cluster.address, **cluster.client_options(self.api_key), **options)
