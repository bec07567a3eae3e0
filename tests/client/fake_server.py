"""A scripted InferenceService on a free port, in threads of the test's own process."""

import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from common.errors import KvrelayError, to_status
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, sampling_pb2, worker_pb2

LIMIT_S = 60.0


@dataclass(frozen=True)
class Hold:
    """A step of a script: say nothing until the client goes away."""


@dataclass(frozen=True)
class Drop:
    """A step of a script: drop the call without a status of the router's own."""


Step = pb.GenerateResponse | KvrelayError | Hold | Drop


def accepted(num_prompt_tokens: int = 5) -> pb.GenerateResponse:
    event = pb.Accepted(
        request_id="req-1",
        num_prompt_tokens=num_prompt_tokens,
        seed=7,
        fingerprint="f00d",
        rendered_unix_s=1_800_000_000,
    )
    return pb.GenerateResponse(accepted=event)


def remote_plan(attempt: int = 1) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        plan=pb.PlanChosen(
            kind=pb.PLAN_KIND_REMOTE,
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-0",
            predicted_cached_tokens=3,
            reason="longest prefix",
            attempt=attempt,
        )
    )


def local_plan() -> pb.GenerateResponse:
    plan = pb.PlanChosen(kind=pb.PLAN_KIND_LOCAL, decode_worker_id="decode-1", reason="short suffix", attempt=1)
    return pb.GenerateResponse(plan=plan)


def tokens(texts: Sequence[str], *, first_index: int = 0, sample_index: int = 0, last: str = "") -> pb.GenerateResponse:
    """One message with a token for each text; `last` ("stop" or "length") ends the sample."""
    made = [
        sampling_pb2.SampleToken(
            sample_index=sample_index, token_index=first_index + i, token_id=100 + first_index + i, text=text
        )
        for i, text in enumerate(texts)
    ]
    if last:
        made[-1].finish_reason = sampling_pb2.FinishReason.Value(f"FINISH_REASON_{last.upper()}")
    return pb.GenerateResponse(tokens=pb.TokenDelta(tokens=made))


def completed(num_output_tokens: int = 2, num_attempts: int = 1) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        completed=pb.Completed(
            usage=pb.Usage(
                num_prompt_tokens=5,
                num_output_tokens=num_output_tokens,
                num_cached_tokens=3,
                num_decode_cached_tokens=2,
            ),
            timings=pb.RequestTimings(
                queue_s=0.001,
                prefill_s=0.25,
                transfer_s=0.004,
                transfer_exposed_s=0.002,
                ttft_s=0.3,
                tpot_s=0.05,
                max_itl_s=0.06,
                e2e_s=0.4,
            ),
            transfer=worker_pb2.TransferStats(
                num_blocks=2,
                kv_bytes=3 << 20,
                transfer_s=0.004,
                exposed_s=0.002,
                transport=worker_pb2.KV_TRANSPORT_SHM,
            ),
            num_attempts=num_attempts,
            seed=7,
        )
    )


def hello_world() -> list[Step]:
    return [accepted(), remote_plan(), tokens(["Hello"]), tokens([" world"], first_index=1, last="stop"), completed()]


def worker_view(worker_id: str, role: int, *, state: str = "ready") -> pb.WorkerView:
    view = pb.WorkerView(worker_id=worker_id, address="127.0.0.1:7001", state=state, role=role)  # type: ignore[arg-type]
    if state == "ready":
        load = worker_pb2.LoadReport(num_running=1, num_waiting=2, num_free_blocks=60, num_blocks=64)
        view.status.CopyFrom(
            worker_pb2.WorkerStatus(
                load=load,
                num_used_blocks=4,
                num_cached_blocks=9,
                num_leases=1,
                kv_bytes_sent=5 << 20,
                num_cached_tokens=30,
                num_computed_tokens=70,
                num_drafted_tokens=50,
                num_accepted_tokens=40,
                uptime_s=75.0,
                pid=4242,
                epoch=99,
                busy_s=12.5,
                device=worker_pb2.DeviceReport(
                    read_bytes_per_s=1e9,
                    flops_per_s=1e12,
                    weight_bytes=100_000_000,
                    kv_bytes_per_token=1000,
                    layer_flops=900_000_000,
                    head_flops=100_000_000,
                    pair_flops=1000,
                ),
                link_rates=[
                    worker_pb2.LinkRate(
                        transport=worker_pb2.KV_TRANSPORT_SHM,
                        most_bytes_per_s=8e9,
                        bytes_per_s=6e9,
                        peer_worker_id="decode-1",
                        num_pulls=12,
                    ),
                    worker_pb2.LinkRate(transport=worker_pb2.KV_TRANSPORT_GRPC, most_bytes_per_s=2e9),
                ],
                recent_steps=[
                    worker_pb2.StepTotals(
                        window_s=3600.0,
                        num_decode_steps=10,
                        decode_s=4.0,
                        decode_memory_s=2.0,
                        decode_compute_s=0.5,
                    )
                ],
            )
        )
        view.timing.decode.num_samples = 9
        view.timing.decode.constant_s = 0.2
    return view


def remote_decision() -> pb.Decision:
    """A decision between two plans, with its outcome."""
    options = [
        ("prefill-0", "decode-1", 0.5, {"queue": 0.125, "prefill": 0.375}),
        ("", "decode-0", 2.0, {"queue": 2.0}),
    ]
    remote, local = pb.PLAN_KIND_REMOTE, pb.PLAN_KIND_LOCAL
    return pb.Decision(
        request_id="req-1",
        attempt=1,
        age_s=90.0,
        policy="predictive",
        num_tokens=1000,
        plan=pb.PlanChosen(
            kind=remote,
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-1",
            predicted_cached_tokens=640,
            reason="least cost",
            attempt=1,
            source_worker_id="decode-0",
            num_source_blocks=40,
            predicted_ttft_s=0.5,
            predicted_tpot_s=0.02,
            ttft_forecast=pb.Forecast(expected_s=1.5, low_s=1.25, high_s=2.0),
            line_ttft_forecast=pb.Forecast(expected_s=3.0),
            tpot_forecast=pb.Forecast(expected_s=0.025, low_s=0.02, high_s=0.05),
        ),
        candidates=[
            pb.Candidate(
                kind=remote if prefill else local,
                prefill_worker_id=prefill,
                decode_worker_id=decode,
                source_worker_id="decode-0" if prefill else "",
                cost=cost,
                terms=terms,
            )
            for prefill, decode, cost, terms in options
        ],
        num_candidates=6,
        decision_s=0.0004,
        waited_s=1.0,
        outcome=pb.DecisionOutcome(
            num_cached_tokens=608,
            ttft_s=0.625,
            tpot_s=0.03,
            ended="completed",
            num_drafted_tokens=50,
            num_accepted_tokens=40,
        ),
    )


def running_decision() -> pb.Decision:
    """A decision of a policy without predictions, still without an outcome."""
    plan = pb.PlanChosen(kind=pb.PLAN_KIND_LOCAL, decode_worker_id="decode-1", attempt=2)
    return pb.Decision(request_id="req-0", attempt=2, policy="random", num_tokens=8, plan=plan)


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Plays `script` to every Generate call and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: list[Step] = hello_world()
        self.first_script: list[Step] = []
        """Played once, to the next call, unless it is empty."""
        self.unary_error: KvrelayError | None = None
        self.generate_requests: list[pb.GenerateRequest] = []
        self.explain_requests: list[pb.ExplainRequest] = []
        self.decisions = [remote_decision(), running_decision()]
        self.traffic: list[pb.RecordTrafficResponse] = []
        """Messages after the beginning of a recording, which then ends unless `goes_on_recording`."""
        self.goes_on_recording = False
        self.record_requests: list[pb.RecordTrafficRequest] = []
        self.embed_requests: list[pb.EmbedRequest] = []
        self.tokenize_requests: list[pb.TokenizeRequest] = []
        self.time_remaining_s: float | None = None
        self.authorization: str | None = None
        self.asked = threading.Event()
        """Set when a Generate call has come."""
        self.client_left = threading.Event()
        """Set when a call ended before its script did."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.generate_requests.append(request)
        self.time_remaining_s = context.time_remaining()
        self.authorization = dict(context.invocation_metadata()).get("authorization")
        call_is_over = threading.Event()
        played: list[Step] = []

        def on_end() -> None:
            call_is_over.set()
            if len(played) < len(script):
                self.client_left.set()

        script = list(self.first_script or self.script)
        self.first_script = []
        if not context.add_callback(on_end):  # the client has left already
            on_end()
        self.asked.set()
        for step in script:
            match step:
                case Hold():
                    assert call_is_over.wait(LIMIT_S), "the client never left"
                    return
                case Drop():
                    context.cancel()
                    return
                case KvrelayError():
                    played.append(step)
                    _abort(context, step)
                case pb.GenerateResponse():
                    played.append(step)
                    yield step

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self.embed_requests.append(request)
        self._maybe_abort(context)
        plan = pb.PlanChosen(kind=pb.PLAN_KIND_PREFILL, prefill_worker_id="prefill-0", attempt=1)
        completed = pb.Completed(usage=pb.Usage(num_prompt_tokens=3), num_attempts=1)
        completed.timings.ttft_s = completed.timings.e2e_s = 0.5
        return pb.EmbedResponse(
            request_id="req-e",
            embedding=struct.pack("<2f", 0.5, -1.0),
            model="tiny",
            fingerprint="f00d",
            completed=completed,
            plans=[plan],
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.tokenize_requests.append(request)
        self._maybe_abort(context)
        words = request.text.split() if request.WhichOneof("input") == "text" else ["a", "b"]
        return pb.TokenizeResponse(token_ids=range(1, len(words) + 1), pieces=words)

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self._maybe_abort(context)
        model = pb.ModelInfo(name="tiny", max_model_len=2048, vocab_size=512, fingerprint="f00d")
        return pb.ListModelsResponse(models=[model])

    def GetClusterStatus(self, request: pb.GetClusterStatusRequest, context: Any) -> pb.GetClusterStatusResponse:
        self._maybe_abort(context)
        return pb.GetClusterStatusResponse(
            router=pb.RouterStatus(
                policy="predictive",
                num_active=2,
                num_completed=11,
                num_failed=1,
                alarms=["no_updates: p0 is silent"],
                refusals=[pb.TenantRefusals(tenant="batch", cause="slo", num_refused=7)],
                http_port=8000,
            ),
            workers=[
                worker_view("prefill-0", worker_pb2.WORKER_ROLE_PREFILL),
                worker_view("decode-0", worker_pb2.WORKER_ROLE_DECODE, state="lost"),
            ],
        )

    def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        self.explain_requests.append(request)
        self._maybe_abort(context)
        return pb.ExplainResponse(decisions=self.decisions)

    def Diagnose(self, request: pb.DiagnoseRequest, context: Any) -> pb.DiagnoseResponse:
        self._maybe_abort(context)
        if request.request_id:
            part = pb.Finding(text="prefill: 2 s, usually 0.1 s")
            return pb.DiagnoseResponse(headline=f"{request.request_id}: 3 s in all", findings=[part])
        wait = pb.Finding(
            cause="prefill", pool="prefill", lost_s=1.5, text="prompts wait 1.5 s", changes=["a prefill worker more: …"]
        )
        gap = pb.Finding(cause="decode", pool="decode", lost_s=0.5, text="a gap is 20 ms")
        walls = [
            pb.PoolWalls(pool=pool, window_s=60.0, covered_s=60.0, busy=0.5, memory=0.4, waiting=0.45, binds="waiting")
            for pool in ("prefill", "decode")
        ]
        return pb.DiagnoseResponse(headline=f"requests of {request.window_s:g} s", findings=[wait, gap], walls=walls)

    def RecordTraffic(self, request: pb.RecordTrafficRequest, context: Any) -> Iterator[pb.RecordTrafficResponse]:
        self.record_requests.append(request)
        self._maybe_abort(context)
        call_is_over = threading.Event()
        context.add_callback(call_is_over.set)
        yield pb.RecordTrafficResponse()
        yield from self.traffic
        if self.goes_on_recording:
            call_is_over.wait(LIMIT_S)

    def _maybe_abort(self, context: Any) -> None:
        if self.unary_error is not None:
            _abort(context, self.unary_error)


def _abort(context: Any, error: KvrelayError) -> NoReturn:
    code, message, trailing = to_status(error)
    context.set_trailing_metadata(trailing)
    context.abort(code, message)
    raise AssertionError("abort raises")


@contextmanager
def serving(fake: FakeInference) -> Iterator[str]:
    """Serve `fake`; yields its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.max_receive_message_length", 1 << 20)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(LIMIT_S)
