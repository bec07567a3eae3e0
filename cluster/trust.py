"""A cluster's authority, the controller's identity, and the operator's identity for commands.

`RUN_DIR/tls/`, which only its owner may read, contains

- `ca.key`, the authority, which never leaves this folder, and `ca.pem`, its certificate, by which clients verify doors;
- `block.key`, the key of block hashes;
- `operator.json`, certificate and key for commands on this host, renewed while the cluster runs; the same in
  `operator.pem` and `operator.key` for programs that take no JSON, such as Prometheus.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from common.config import ServingConfig
from common.errors import Unauthenticated
from common.ports import is_loopback
from common.trust.authority import Authority, AuthoritySettings, write_private
from common.trust.channels import Reach
from common.trust.credentials import LOOK_S, Credentials
from common.trust.identity import Role
from common.trust.proofs import OPERATOR_AUDIENCE

logger = logging.getLogger(__name__)

_FOLDER = "tls"
_CA_FILE = "ca.pem"
_OPERATOR_FILE = "operator.json"
_OPERATOR_PROOF_S = 12 * 3600.0
"""A load test uses one proof for its whole duration; the certificate must be valid as long."""


class Trust:
    """The authority and the identities of a cluster. Event loop only."""

    def __init__(self, authority: Authority, *, folder: Path, has_own_files: bool) -> None:
        """`has_own_files`: doors show the user's own certificate, which another authority has signed."""
        self.authority = authority
        self.door_tls: bool | str = False
        """How clients on this host connect to the doors, as `kvrelay.client.tls.Tls`."""
        if authority.settings.is_encrypted:
            self.door_tls = True if has_own_files else str(folder / _CA_FILE)
        self.credentials = Credentials.of(authority, Role.CONTROLLER, "controller")
        self._operator = Credentials.of(authority, Role.OPERATOR, "operator")
        self._folder = folder
        self._keep_operator()

    @classmethod
    def open(cls, config: ServingConfig, run_dir: Path, *, is_spread: bool) -> "Trust":
        """Return the trust of a run folder's cluster. Raises OSError or ValueError for an unusable folder.

        `is_spread`: its processes may run on several hosts.
        """
        settings = AuthoritySettings(
            cluster=config.name,
            is_encrypted=is_encrypted(config, is_spread=is_spread),
            allows_plain_text=config.tls.insecure,
            lifetime_s=config.tls.lifetime_s,
        )
        folder = run_dir / _FOLDER
        return cls(Authority.open(folder, settings), folder=folder, has_own_files=config.tls.mode == "files")

    @property
    def reach(self) -> Reach:
        """How the controller calls its processes."""
        return Reach.of(self.credentials)

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the controller's and the operator's certificates while the block runs."""
        task = asyncio.create_task(self._renew(), name="renew certificates")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _renew(self) -> None:
        is_kept = True
        while True:
            await (self.credentials.until_renewal() if is_kept else asyncio.sleep(LOOK_S))
            try:
                if self.credentials.renewal_due_s <= 0:
                    self._renew_now()
                self._keep_operator()
                is_kept = True
            except Exception as error:  # noqa: BLE001 - a full disk, say: commands and scrapes fail, but the cluster runs
                logger.error("certificates not written: %s", error)
                is_kept = False

    def _renew_now(self) -> None:
        for credentials, role in ((self._operator, Role.OPERATOR), (self.credentials, Role.CONTROLLER)):
            credentials.renew(partial(self.authority.enrol, role=role, name=credentials.identity.name))

    def _keep_operator(self) -> None:
        held = self._operator.held
        write_private(self._folder / _OPERATOR_FILE, self._operator.to_json().encode())
        write_private(self._folder / "operator.key", held.key_pem)
        write_private(self._folder / "operator.pem", held.certificate_pem)


def is_encrypted(config: ServingConfig, *, is_spread: bool) -> bool:
    """Return whether a cluster's connections are TLS."""
    leaves_host = is_spread or not is_loopback(config.router.host)
    return config.tls.mode in ("on", "files") or (config.tls.mode == "auto" and leaves_host)


def operator_credentials(run_dir: Path) -> Credentials | None:
    """Return the operator's credentials in a run folder; None if there are none that we can read."""
    try:
        return Credentials.from_json((run_dir / _FOLDER / _OPERATOR_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def reach_of(run_dir: Path) -> Reach:
    """Return how an operator reaches the processes of a run folder's cluster. Raises Unauthenticated."""
    credentials = operator_credentials(run_dir)
    if credentials is None:
        raise Unauthenticated(
            f"cannot read the operator's certificate in {run_dir / _FOLDER}: ask on the host, and as the user, of the"
            " cluster's `kvrelay up`"
        )
    return Reach.of(credentials)


def operator_proof(run_dir: Path) -> str | None:
    """Return the proof that identifies an operator to a router's door; None without credentials."""
    credentials = operator_credentials(run_dir)
    if credentials is None:
        return None
    return credentials.held.signer.sign({}, audience=OPERATOR_AUDIENCE, lifetime_s=_OPERATOR_PROOF_S)
