"""Prompts that a worker accepts or refuses by what their routers expect."""

import math

import pytest

from common.errors import InvalidRequest, Overloaded
from kvrelay.v1 import sequence_pb2
from worker.prefill_gate import PrefillGate, Quarantine


def prompt(*, max_wait_s: float, prefill_s: float = 1.0) -> sequence_pb2.SequenceSpec:
    booking = sequence_pb2.PrefillBooking(max_wait_s=max_wait_s, prefill_s=prefill_s)
    return sequence_pb2.SequenceSpec(prefill_booking=booking)


def test_prompt_behind_an_unreported_one_is_refused_until_the_engine_has_that() -> None:
    gate = PrefillGate(lambda: 0.0)
    with gate.entering(prompt(max_wait_s=0.2, prefill_s=1.5)):
        with pytest.raises(Overloaded) as caught, gate.entering(prompt(max_wait_s=0.2)):
            pass
        assert caught.value.retry_after_s == pytest.approx(1.3)
        with gate.entering(prompt(max_wait_s=1.5)):
            pass
    with gate.entering(prompt(max_wait_s=0.0)):
        pass


def test_prompt_is_refused_for_the_prompts_in_the_engine() -> None:
    gate = PrefillGate(lambda: 0.3)
    with (
        pytest.raises(Overloaded, match=r"take 0\.30 s"),
        gate.entering(prompt(max_wait_s=0.2)),
    ):
        pass


def test_prompt_without_a_booking_waits_as_long_as_it_takes() -> None:
    gate = PrefillGate(lambda: math.inf)
    with gate.entering(sequence_pb2.SequenceSpec()):
        pass


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["max_wait_s", "prefill_s"])
def test_booking_that_is_not_in_seconds_is_refused_by_field(name: str, seconds: float) -> None:
    gate = PrefillGate(lambda: 0.0)
    with pytest.raises(InvalidRequest) as caught, gate.entering(prompt(**{"max_wait_s": 0.0, name: seconds})):
        pass
    assert caught.value.field == f"sequence.prefill_booking.{name}"


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
