import dataclasses

import pytest

from common.errors import EngineFault
from common.wire import pack_tokens
from common.wire_names import FinishReason
from kvrelay.client.collect import EventBuffer
from kvrelay.client.convert import events_from_proto
from kvrelay.client.events import (
    Accepted,
    Completed,
    Forecast,
    PlanChosen,
    PromptLogprobs,
    Queued,
    RequestTimings,
    Token,
    TokenRun,
    TransferStats,
    Usage,
)
from kvrelay.client.explanations import Candidate, Decision, DecisionOutcome
from kvrelay.client.results import ModelInfo
from kvrelay.client.status import (
    ClusterStatus,
    Forgotten,
    ForgottenWorker,
    RouterStatus,
    WorkerLoad,
    WorkerStatus,
    WorkerView,
)
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2, worker_pb2
from tests.client.messages import accepted, completed, local_plan


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Accepted, pb.Accepted),
        (PlanChosen, pb.PlanChosen),
        (Forecast, pb.Forecast),
        (Queued, pb.Queued),
        (Token, sampling_pb2.SampleToken),
        (Usage, pb.Usage),
        (RequestTimings, pb.RequestTimings),
        (TransferStats, worker_pb2.TransferStats),
        (Completed, pb.Completed),
        (ModelInfo, pb.ModelInfo),
        (Candidate, pb.Candidate),
        (Decision, pb.Decision),
        (DecisionOutcome, pb.DecisionOutcome),
        (RouterStatus, pb.RouterStatus),
        (WorkerLoad, worker_pb2.LoadReport),
        (WorkerStatus, worker_pb2.WorkerStatus),
        (WorkerView, pb.WorkerView),
        (ClusterStatus, pb.GetClusterStatusResponse),
        (Forgotten, pb.ForgetTenantResponse),
        (ForgottenWorker, pb.ForgottenWorker),
    ],
)
def test_record_has_exactly_the_fields_of_its_message(record: type, message: type) -> None:
    wire = {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert {field.name for field in dataclasses.fields(record)} == wire


def runs(*made: sampling_pb2.TokenRun) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.TokenDelta(runs=made))


def test_runs_become_events_and_an_answer_without_text() -> None:
    buffer = EventBuffer()
    buffer.feed(accepted())
    buffer.feed(local_plan())
    buffer.feed(runs(sampling_pb2.TokenRun(tokens=pack_tokens([7, 300_000]))))
    with pytest.raises(EngineFault, match="token 3 arrived after 2"):
        buffer.feed(runs(sampling_pb2.TokenRun(first_token_index=3, tokens=b"1234")))
    length = sampling_pb2.FINISH_REASON_LENGTH
    buffer.feed(runs(sampling_pb2.TokenRun(first_token_index=2, tokens=pack_tokens([9]), finish_reason=length)))
    buffer.feed(completed())
    assert buffer.take_all()[2:4] == (
        TokenRun(sample_index=0, first_token_index=0, token_ids=(7, 300_000), finish_reason=None),
        TokenRun(sample_index=0, first_token_index=2, token_ids=(9,), finish_reason=FinishReason.LENGTH),
    )
    sample = buffer.build().samples[0]
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", (7, 300_000, 9), FinishReason.LENGTH)


def test_prompt_logprobs_come_before_the_first_token() -> None:
    position = sampling_pb2.PositionLogprobs(
        chosen=sampling_pb2.TokenLogprob(token_id=3, logprob=-0.5),
        top=[sampling_pb2.TokenLogprob(token_id=4, logprob=-0.25)],
    )
    token = sampling_pb2.SampleToken(token_id=9, text="x", logprobs=position)
    delta = pb.TokenDelta(tokens=[token], prompt_logprobs=[position])
    first, second = events_from_proto(pb.GenerateResponse(tokens=delta))
    assert isinstance(first, PromptLogprobs)
    assert (first.positions[0].chosen.token_id, first.positions[0].chosen.logprob) == (3, -0.5)
    assert isinstance(second, Token)
    assert second.logprobs == first.positions[0]
    assert second.logprobs.top[0].token_id == 4


def test_values_that_do_not_exist_are_none() -> None:
    message = pb.GenerateResponse()
    message.completed.SetInParent()
    (event,) = events_from_proto(message)
    assert isinstance(event, Completed)
    assert (event.timings.tpot_s, event.timings.max_itl_s, event.transfer.transport) == (None, None, None)


def test_unknown_enum_value_raises_engine_fault() -> None:
    message = pb.GenerateResponse(plan=pb.PlanChosen(kind=77))  # type: ignore[arg-type]
    with pytest.raises(EngineFault, match="plan kind 77"):
        list(events_from_proto(message))


def test_unknown_event_is_skipped() -> None:
    assert list(events_from_proto(pb.GenerateResponse())) == []
    assert len(list(events_from_proto(completed()))) == 1
