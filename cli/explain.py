"""`kvrelay explain`."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from cli.console import err, print_wide
from cli.options import JsonOption, options_from_dataclasses
from cli.render import SplitTable, forecast_text, plan_text, seconds
from cli.target import ConnectionOptions
from kvrelay.client import Candidate, Decision, PlanChosen

_TIMEOUT_S = 10.0


@options_from_dataclasses
def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="[REQUEST_ID]", help="The id in `generate --show-stats` and in the logs.")
    ] = None,
    *,
    connection: ConnectionOptions,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="Largest number of decisions.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show the router's decisions on requests: the options, the choice and its outcome.

    \b
    kvrelay explain                  the latest decisions
    kvrelay explain req-…            those on one request
    kvrelay explain --last 100 --json | jq '.[].outcome'
    """  # noqa: D301 - \b marks a preformatted block
    with connection.client(timeout_s=_TIMEOUT_S) as client:
        decisions = client.explain(request_id, limit=last)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(decision) for decision in decisions], indent=2))
    elif decisions:
        print_wide(Group(*_spaced(decisions)))
    else:
        whose = (
            f" on {request_id}, or it is another tenant's: `kvrelay why --request {request_id}`" if request_id else ""
        )
        err.print(f"the router remembers no decision of this tenant{whose}")
        raise typer.Exit(1)


def _spaced(decisions: Sequence[Decision]) -> Iterator[RenderableType]:
    for position, decision in enumerate(decisions):
        if position:
            yield ""
        yield _view(decision)


def _view(decision: Decision) -> RenderableType:
    """Return one decision: a headline, its candidates, predicted beside actual."""
    plan, outcome = decision.plan, decision.outcome
    whole_s = None if outcome.ttft_s is None else decision.waited_s + outcome.ttft_s
    headline = (
        f"{decision.request_id} · attempt {decision.attempt} · {seconds(decision.age_s)} ago"
        f" · {outcome.ended or 'running'}\n"
        f"policy {decision.policy}: {decision.num_tokens} tokens, {decision.num_candidates} options"
        f" in {seconds(decision.decision_s)}, {seconds(decision.waited_s)} after receipt\n"
        f"chosen {plan_text(plan)} ({plan.reason})"
    )
    rows = [
        ("cached tokens", str(plan.predicted_cached_tokens), _count(outcome.num_cached_tokens)),
        ("choice to first token", seconds(plan.predicted_ttft_s or None), seconds(outcome.ttft_s)),
        ("receipt to first token", forecast_text(plan.ttft_forecast), seconds(whole_s)),
        ("… on entering the line", forecast_text(plan.line_ttft_forecast), seconds(whole_s)),
        ("gap between tokens", _gap_text(plan), seconds(outcome.tpot_s)),
    ]
    if outcome.num_drafted_tokens:
        drafts = f"{outcome.num_accepted_tokens} of {outcome.num_drafted_tokens} right"
        rows.append(("drafted tokens", "–", drafts))
    if outcome.num_pinned_tokens or outcome.num_refused_pin_tokens:
        pins = f"{outcome.num_pinned_tokens}, {outcome.num_refused_pin_tokens} refused"
        rows.append(("pinned tokens", "–", pins))
    comparison = SplitTable(("", "predicted", "actual"), rows, num_left=1)
    candidates = [_candidate_table(decision.candidates), ""] if decision.candidates else []
    return Group(headline, "", *candidates, comparison)


def _candidate_table(candidates: Sequence[Candidate]) -> RenderableType:
    """Return a row for each option, the chosen one first, and a column for each term that any of them has."""
    names = sorted({name for candidate in candidates for name in candidate.terms})
    rows = (
        [
            _workers(candidate),
            candidate.source_worker_id or "",
            f"{candidate.cost:.4g}",
            *(f"{candidate.terms[name]:.4g}" if name in candidate.terms else "" for name in names),
        ]
        for candidate in candidates
    )
    return SplitTable(("candidate", "pull from", "cost", *names), rows, num_left=2)


def _workers(candidate: Candidate) -> str:
    workers = [worker for worker in (candidate.prefill_worker_id, candidate.decode_worker_id) if worker]
    return f"{candidate.kind.value} {' → '.join(workers)}"


def _gap_text(plan: PlanChosen) -> str:
    """Return the forecast, or the bare prediction of a router without forecasts."""
    return seconds(plan.predicted_tpot_s or None) if plan.tpot_forecast is None else forecast_text(plan.tpot_forecast)


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)
