import dataclasses

import pytest

from common.errors import EngineFault
from kvrelay.client.convert import events_from_proto
from kvrelay.client.records import (
    Accepted,
    Completed,
    ModelInfo,
    PlanChosen,
    PromptLogprobs,
    RequestTimings,
    Token,
    TransferStats,
    Usage,
)
from kvrelay.client.status import ClusterStatus, RouterStatus, WorkerLoad, WorkerStatus, WorkerView
from kvrelay.v1 import inference_pb2, sampling_pb2, worker_pb2
from tests.client.fake_server import completed


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Accepted, inference_pb2.Accepted),
        (PlanChosen, inference_pb2.PlanChosen),
        (Token, sampling_pb2.SampleToken),
        (Usage, inference_pb2.Usage),
        (RequestTimings, inference_pb2.RequestTimings),
        (TransferStats, worker_pb2.TransferStats),
        (Completed, inference_pb2.Completed),
        (ModelInfo, inference_pb2.ModelInfo),
        (RouterStatus, inference_pb2.RouterStatus),
        (WorkerLoad, worker_pb2.LoadReport),
        (WorkerStatus, worker_pb2.WorkerStatus),
        (WorkerView, inference_pb2.WorkerView),
        (ClusterStatus, inference_pb2.GetClusterStatusResponse),
    ],
)
def test_record_has_exactly_the_fields_of_its_message(record: type, message: type) -> None:
    wire = {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert {field.name for field in dataclasses.fields(record)} == wire


def test_prompt_logprobs_come_before_the_first_token() -> None:
    position = sampling_pb2.PositionLogprobs(
        chosen=sampling_pb2.TokenLogprob(token_id=3, logprob=-0.5),
        top=[sampling_pb2.TokenLogprob(token_id=4, logprob=-0.25)],
    )
    token = sampling_pb2.SampleToken(token_id=9, text="x", logprobs=position)
    delta = inference_pb2.TokenDelta(tokens=[token], prompt_logprobs=[position])
    first, second = events_from_proto(inference_pb2.GenerateResponse(tokens=delta))
    assert isinstance(first, PromptLogprobs)
    assert (first.positions[0].chosen.token_id, first.positions[0].chosen.logprob) == (3, -0.5)
    assert isinstance(second, Token)
    assert second.logprobs == first.positions[0]
    assert second.logprobs.top[0].token_id == 4


def test_values_that_do_not_exist_are_none() -> None:
    message = inference_pb2.GenerateResponse()
    message.completed.SetInParent()
    (event,) = events_from_proto(message)
    assert isinstance(event, Completed)
    assert (event.timings.mean_itl_s, event.timings.max_itl_s, event.transfer.transport) == (None, None, None)


def test_unknown_enum_value_raises_engine_fault() -> None:
    message = inference_pb2.GenerateResponse(plan=inference_pb2.PlanChosen(kind=77))  # type: ignore[arg-type]
    with pytest.raises(EngineFault, match="plan kind 77"):
        list(events_from_proto(message))


def test_unknown_event_is_skipped() -> None:
    assert list(events_from_proto(inference_pb2.GenerateResponse())) == []
    assert len(list(events_from_proto(completed()))) == 1  # type: ignore[arg-type]
