"""Whether a puller may have what it asks for: its ticket is checked against who it is and what it wants."""

from collections.abc import Callable

from common.ids import Epoch, HandoffId, WorkerId
from common.trust.credentials import Credentials
from common.trust.guard import caller
from common.trust.tickets import PullRight, check_ticket, of_blocks, of_handoff
from kvrelay.v1 import kv_transfer_pb2 as pb

CheckPull = Callable[[WorkerId, pb.OpenFetch], None]
"""Takes the serving worker and the first message of a puller. Raises AccessDenied."""


def check_by(credentials: Credentials) -> CheckPull:
    """Return the check of a worker with these credentials, for calls behind a `Guard`."""

    def check(source: WorkerId, opened: pb.OpenFetch) -> None:
        identity = caller()
        is_handoff = bool(opened.handoff_id)
        right = PullRight(
            puller=WorkerId(identity.name),
            source=source,
            epoch=Epoch(opened.epoch),
            subject=of_handoff(HandoffId(opened.handoff_id)) if is_handoff else of_blocks(opened.block_hashes),
        )
        check_ticket(opened.ticket, right, caller=identity, verifier=credentials.held.verifier)

    return check
