"""Messages of a scripted router: the parts of an answer, workers as it sees them, and its decisions."""

from collections.abc import Sequence

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2, worker_pb2


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


def worker_view(worker_id: str, role: int, *, state: str = "ready") -> pb.WorkerView:
    view = pb.WorkerView(worker_id=worker_id, address="127.0.0.1:7001", state=state, role=role)  # type: ignore[arg-type]
    if state == "ready":
        load = worker_pb2.LoadReport(num_running=1, num_waiting=2, num_free_blocks=60, num_blocks=64)
        load.num_window_pages, load.num_promised_window_pages = 12, 3
        load.num_tier_blocks, load.max_tier_blocks = 500, 800
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
            num_pinned_tokens=512,
            num_refused_pin_tokens=64,
        ),
    )


def running_decision() -> pb.Decision:
    """A decision of a policy without predictions, still without an outcome."""
    plan = pb.PlanChosen(kind=pb.PLAN_KIND_LOCAL, decode_worker_id="decode-1", attempt=2)
    return pb.Decision(request_id="req-0", attempt=2, policy="random", num_tokens=8, plan=plan)
