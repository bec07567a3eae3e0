"""Requests that may be what ends a worker: one of them at a time, whichever routers they come from."""

import pytest

from common.errors import Overloaded
from kvrelay.v1 import sequence_pb2
from worker.quarantine import Quarantine


def spec(request_id: str, *, quarantined: bool = True) -> sequence_pb2.SequenceSpec:
    return sequence_pb2.SequenceSpec(request_id=request_id, quarantined=quarantined)


def test_second_quarantined_request_is_refused_until_the_first_has_ended() -> None:
    quarantine = Quarantine()
    with quarantine.holding(spec("a")):
        with pytest.raises(Overloaded, match="another quarantined request"), quarantine.holding(spec("b")):
            pass
        with quarantine.holding(spec("c", quarantined=False)):
            pass
    with quarantine.holding(spec("b")):
        pass


def test_calls_of_one_quarantined_request_share_its_place() -> None:
    quarantine = Quarantine()
    with quarantine.holding(spec("a")):
        with quarantine.holding(spec("a")):
            pass
        with pytest.raises(Overloaded), quarantine.holding(spec("b")):
            pass
