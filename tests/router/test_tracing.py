"""The door decides which requests are traced, whatever clients ask for; and what a trace of each outcome shows."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from common.config import TracingConfig
from common.errors import PromptTooLong, WorkerLost
from common.ids import RequestId, WorkerId
from common.lifecycle import LifeCycle, State
from common.tracing import NO_STAGES, Span, SpanContext, parse_traceparent
from kvrelay.v1 import inference_pb2 as pb
from router.fleet.decisions import DecisionRecord
from router.observe.tracing import RequestTraces
from router.placement.plans import Plan
from router.requests.attempt import AttemptOutcome
from router.tenants import ANYBODY
from tests.clock import ManualClock
from tests.common.test_tracing import HEADER, PLACE, Kept
from tests.router.fake_worker import MODEL, pair, trio
from tests.router.fakes import Reply, TestCluster, make_request, prompt_of, running_cluster
from tests.router.http.clients import COMPLETIONS, body_of, fetch, http_cluster

ALL, NONE = TracingConfig(sample_rate=1.0), TracingConfig(sample_rate=0.0)


def traced(cluster: TestCluster, config: TracingConfig = ALL) -> Kept:
    kept = Kept()
    cluster.router.door.parts.orchestrator.traces.record_to(kept, config)
    return kept


async def traced_root(cluster: TestCluster, kept: Kept) -> Span:
    """Wait for the end of all requests; return the one span that has no parent here."""
    await cluster.until_idle()
    contexts = {span.context for span in kept.spans}
    (root,) = [span for span in kept.spans if span.parent not in contexts]
    return root


def attempts_in(kept: Kept) -> list[Span]:
    return [span for span in kept.spans if span.name == "attempt"]


def new_traces(config: TracingConfig = ALL) -> tuple[RequestTraces, Kept, ManualClock]:
    kept, clock = Kept(), ManualClock()
    traces = RequestTraces(clock)
    traces.record_to(kept, config)
    return traces, kept, clock


def decision_on(life: LifeCycle, *, decided_s: float, **fields: Any) -> DecisionRecord:
    plan = Plan(answering=WorkerId("d0"), predicted_cached_tokens=0, reason="")
    return DecisionRecord(request_id=life.request_id, tenant="", num_tokens=8, plan=plan, decided_s=decided_s, **fields)


def names_below(spans: list[Span], parent: Span) -> list[str]:
    found = [span for span in spans if span.parent == parent.context]
    return [span.name for span in sorted(found, key=lambda span: span.start_s)]


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_share_of_requests_that_is_traced_is_the_configured_one(rate: float) -> None:
    traces, _kept, _clock = new_traces(TracingConfig(sample_rate=rate))
    begun = [
        traces.begin(LifeCycle(RequestId(f"r{number}"), ManualClock()), ANYBODY, "") is not NO_STAGES
        for number in range(4000)
    ]
    assert sum(begun) / 4000 == pytest.approx(rate, abs=0.05)


def test_client_that_asks_for_every_trace_gets_its_minutes_worth() -> None:
    traces, _kept, clock = new_traces(TracingConfig(sample_rate=0.0, client_traces_per_min=6))

    def num_traced() -> int:
        lives = [LifeCycle(RequestId(f"r{clock.monotonic()}-{number}"), clock) for number in range(100)]
        return sum(traces.begin(life, ANYBODY, HEADER) is not NO_STAGES for life in lives)

    assert num_traced() == 6
    assert num_traced() == 0
    clock.advance(20.0)
    assert num_traced() == 2


def test_client_that_forbids_tracing_is_sampled_like_all_others() -> None:
    traces, kept, clock = new_traces()
    life = LifeCycle(RequestId("r"), clock)
    assert traces.begin(life, ANYBODY, HEADER[:-1] + "0") is not NO_STAGES
    life.advance(State.FAILED)
    traces.end(life, "Overloaded")
    assert kept.spans[0].parent == SpanContext(trace_id=PLACE.trace_id, span_id=PLACE.span_id, is_sampled=False)


async def test_trace_of_a_client_goes_on_at_the_router_and_at_both_workers(cluster: TestCluster) -> None:
    kept = traced(cluster, NONE)
    await cluster.read(cluster.inference.Generate(make_request(), metadata=(("traceparent", HEADER),)), Reply())
    await cluster.generate(make_request())  # asks for nothing, and the rate is 0
    assert (await traced_root(cluster, kept)).parent == PLACE
    (attempt,) = attempts_in(kept)
    for worker in (cluster.prefill, cluster.decode):
        first, second = (request.sequence.traceparent for request in worker.requests)
        assert (parse_traceparent(first), second) == (attempt.context, "")


async def test_names_of_a_request_are_those_of_the_conventions_for_generative_ai(cluster: TestCluster) -> None:
    registry = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    kept = traced(cluster)
    await cluster.generate(make_request())
    root = await traced_root(cluster, kept)
    known = {value for value in vars(registry).values() if isinstance(value, str)}
    names = {name for name in root.attributes if name.startswith("gen_ai.")}
    assert len(names) > 10
    assert names <= known, "no tool that knows the conventions would show it"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_trace_of_an_http_client_goes_on() -> None:
    async with http_cluster(*pair()) as http:
        kept = traced(http.cluster, NONE)
        await fetch(http.port, "POST", COMPLETIONS, body_of(), traceparent=HEADER)
        root = await traced_root(http.cluster, kept)
    assert root.parent == PLACE
    assert names_below(kept.spans, root) == ["door", "tokenize", "line", "choice", "attempt"]


async def test_prompt_that_is_too_long_shows_where_it_was_refused(cluster: TestCluster) -> None:
    kept = traced(cluster)
    with pytest.raises(PromptTooLong):
        await cluster.generate(make_request(1 << 17))
    root = await traced_root(cluster, kept)
    assert (root.name, root.error) == ("request", "PromptTooLong")
    assert names_below(kept.spans, root) == ["door", "tokenize"]


async def test_attempt_that_fails_before_its_first_call_keeps_its_error(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = traced(cluster)
    orchestrator = cluster.router.door.parts.orchestrator
    booked, fleet = orchestrator.traces.attempt, cluster.router.door.parts.fleet

    def roll_out(life: LifeCycle, decision: DecisionRecord) -> AbstractContextManager[str]:
        """Change the model between the check of a request and its plan."""
        fleet.model = replace(MODEL, fingerprint="another model")
        return booked(life, decision)

    monkeypatch.setattr(orchestrator.traces, "attempt", roll_out)
    with pytest.raises(WorkerLost, match="are gone"):
        await cluster.generate(make_request())
    await cluster.until_idle()
    (attempt,) = attempts_in(kept)
    assert attempt.error == "WorkerLost"
    assert names_below(kept.spans, attempt) == []


async def test_every_worker_that_refuses_is_an_attempt_of_its_own() -> None:
    workers = trio()
    workers[1].num_refusals = workers[2].num_refusals = 1
    workers[2].retry_after_s = 0.01
    async with running_cluster(*workers) as cluster:
        kept = traced(cluster)
        await cluster.generate(make_request())
        await cluster.until_idle()
    attempts = attempts_in(kept)
    assert [span.error for span in attempts] == ["Overloaded", "Overloaded", ""]
    assert [span.links for span in attempts] == [(), (attempts[0].context,), (attempts[1].context,)]


def test_request_that_finds_no_second_worker_shows_its_last_wait() -> None:
    traces, kept, clock = new_traces()
    life = LifeCycle(RequestId("r"), clock)
    traces.begin(life, ANYBODY, "").enter("line")
    clock.advance(1.0)
    decision = decision_on(life, decided_s=1.0, decision_s=0.25)
    with traces.attempt(life, decision):
        life.advance(State.RESERVING)
        clock.advance(2.0)
        decision.ended = "WorkerLost"
    life.advance(State.QUEUED)
    clock.advance(4.0)
    life.advance(State.FAILED)
    traces.end(life, "WorkerLost")

    (root,) = [span for span in kept.spans if span.name == "request"]
    below = sorted((span for span in kept.spans if span.parent == root.context), key=lambda span: span.start_s)
    assert [(span.name, span.start_s, span.end_s) for span in below] == [
        ("door", 0.0, 0.0),
        ("line", 0.0, 0.75),
        ("choice", 0.75, 1.0),
        ("attempt", 1.0, 3.0),
        ("line", 3.0, 7.0),
    ]


@pytest.mark.parametrize("outcome", AttemptOutcome)
def test_attempt_after_which_the_answer_goes_on_is_no_failure(outcome: AttemptOutcome) -> None:
    traces, kept, clock = new_traces()
    life = LifeCycle(RequestId("r"), clock)
    traces.begin(life, ANYBODY, "").enter("line")
    with traces.attempt(life, decision_on(life, decided_s=0.0, ended=outcome.value)):
        life.advance(State.RESERVING)
    life.advance(State.FAILED)
    traces.end(life, "WorkerLost")
    assert [span.error for span in attempts_in(kept)] == [""]


def test_samples_that_go_on_separately_link_to_their_own_attempts() -> None:
    traces, kept, clock = new_traces()
    shared = LifeCycle(RequestId("r"), clock)
    traces.begin(shared, ANYBODY, "").enter("line")

    @contextmanager
    def attempt(life: LifeCycle, number: int, ended: str) -> Iterator[None]:
        decision = decision_on(life, decided_s=clock.monotonic(), attempt=number)
        with traces.attempt(life, decision):
            life.advance(State.RESERVING)
            yield
            clock.advance(1.0)
            decision.ended = ended
        life.advance(State.FINISHED if ended == "completed" else State.QUEUED)

    clock.advance(1.0)
    with attempt(shared, 1, "WorkerLost"):
        pass
    other = LifeCycle(RequestId("r"), clock)
    with attempt(shared, 2, "WorkerLost"), attempt(other, 3, "WorkerLost"):
        pass
    with attempt(shared, 4, "WorkerLost"):
        pass
    with attempt(other, 5, "WorkerLost"):
        pass
    shared.advance(State.FAILED)
    traces.end(shared, "WorkerLost")

    attempts = {span.attributes["kvrelay.attempt"]: span for span in attempts_in(kept)}
    number_of = {span.context: number for number, span in attempts.items()}
    links = {number: [number_of[link] for link in span.links] for number, span in attempts.items()}
    assert links == {1: [], 2: [1], 3: [1], 4: [2], 5: [3]}


def test_first_line_ends_with_the_first_choice_when_another_sample_ends_before() -> None:
    traces, kept, clock = new_traces()
    first = LifeCycle(RequestId("r"), clock)
    traces.begin(first, ANYBODY, "").enter("line")  # an answer that another router began: separate from the start
    second = LifeCycle(RequestId("r"), clock)
    clock.advance(1.0)
    with traces.attempt(first, decision_on(first, decided_s=1.0, ended="completed")):
        first.advance(State.RESERVING)
        clock.advance(1.0)
        with traces.attempt(second, decision_on(second, decided_s=2.0, ended="completed")):
            clock.advance(1.0)
    first.advance(State.FAILED)
    traces.end(first, "WorkerLost")
    assert [(span.start_s, span.end_s) for span in kept.spans if span.name == "line"] == [(0.0, 1.0), (0.0, 2.0)]


async def test_choice_shows_what_each_option_would_have_cost() -> None:
    async with running_cluster(*trio()) as cluster:
        kept = traced(cluster)
        await cluster.generate(make_request())
        await cluster.until_idle()
        explained = await cluster.inference.Explain(pb.ExplainRequest())
    (choice,) = [span for span in kept.spans if span.name == "choice"]
    costs = [event.attributes["kvrelay.cost"] for event in choice.events]
    assert costs == [candidate.cost for candidate in explained.decisions[0].candidates]
    assert len(costs) > 1


async def test_embedding_is_traced_without_an_answer(cluster: TestCluster) -> None:
    kept = traced(cluster)
    await cluster.embed(pb.EmbedRequest(token_ids=pb.TokenIds(ids=prompt_of(10))))
    root = await traced_root(cluster, kept)
    assert root.name.startswith("embeddings ")
    assert root.attributes["gen_ai.usage.input_tokens"] == 10
    (attempt,) = attempts_in(kept)
    assert attempt.attributes["kvrelay.prefill"] == "p0"
    assert "kvrelay.decode" not in attempt.attributes
    assert "gen_ai.usage.output_tokens" not in root.attributes
    assert not root.events


def exemplars(cluster: TestCluster) -> dict[str, dict[str, str]]:
    """Return what each metric shows beside its buckets."""
    families = cluster.router.door.parts.metrics.registry.collect()
    samples = (sample for family in families for sample in family.samples)
    return {sample.name: sample.exemplar.labels for sample in samples if sample.exemplar is not None}


async def test_metrics_lead_to_the_traces_of_sampled_requests(cluster: TestCluster) -> None:
    kept = traced(cluster)
    await cluster.generate(make_request())
    root = await traced_root(cluster, kept)
    assert exemplars(cluster) == {
        f"kvrelay_{name}_seconds_bucket": {"trace_id": f"{root.context.trace_id:032x}"}
        for name in ("ttft", "e2e", "queue", "prefill", "transfer", "tpot")
    }


async def test_request_that_is_not_sampled_leaves_no_exemplar(cluster: TestCluster) -> None:
    traced(cluster, NONE)
    await cluster.generate(make_request())
    assert exemplars(cluster) == {}
