"""Every query of the dashboards and rules asks for metrics, labels and label values that a cluster exports."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from prometheus_client import CollectorRegistry

from cluster.changes.autopilot import PlanGauges
from cluster.planner.plan import PoolSizes
from common.errors import KvrelayError, RefusalCause
from deploy.observability.dashboards import DASHBOARDS, FOLDER, documents
from router.observe.alarms import AlarmKind
from tests.e2e.in_process import running_system
from worker.metrics import RuntimeCollector
from worker.prefix_pull import PullOutcome

_REPO = Path(__file__).parents[2]
_OBSERVABILITY = _REPO / "deploy" / "observability"
_SELECTOR = re.compile(r"\b((?:\w+:)?kvrelay_\w+(?::\w+)?|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\bby \(([^)]*)\) \(")
_SHOWN = re.compile(r"\{\{ ?(?:\$labels\.)?([a-z_]+)(?: \|[^}]*)? ?\}\}")
_SUMMED = re.compile(r"\b(sum|min|max|avg)\s?\(")
_SCRAPED = frozenset({"instance", "job"})
"""Labels that Prometheus adds."""

Labels = Mapping[str, frozenset[str]]
"""Label names by metric."""


def names_of_errors(kind: type[KvrelayError] = KvrelayError) -> Iterator[str]:
    yield kind.__name__
    for each in kind.__subclasses__():
        yield from names_of_errors(each)


def known_values() -> dict[tuple[str, str], set[str]]:
    """Return the values of labels by metric and label, from the code that sets them."""
    return {
        ("kvrelay_requests_total", "outcome"): {*names_of_errors(), "bug", "completed", "cancelled"},
        ("kvrelay_tenant_refusals_total", "cause"): {cause.value for cause in RefusalCause},
        ("kvrelay_prefix_pulls_total", "outcome"): {outcome.value for outcome in PullOutcome},
        ("kvrelay_routing_alarm", "kind"): {kind.value for kind in AlarmKind},
        ("kvrelay_tenant_tokens_total", "kind"): {"prompt_computed", "prompt_cached", "output"},
        ("kvrelay_kv_transfer_bytes_total", "direction"): {"sent", "received"},
        ("kvrelay_planner_changes_total", "outcome"): {"done", "failed"},
        ("up", "job"): {"kvrelay"},
    }


def documented() -> dict[str, frozenset[str]]:
    """Return the labels of each metric in docs/metrics.md."""
    workers = frozenset({"worker", "role"})
    found: dict[str, frozenset[str]] = {}
    text = (_REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    for heading, section in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        for name, kind, labels in re.findall(r"^\| `(kvrelay_\w+)` \| (\w+) \|(.*?)\|", section, re.MULTILINE):
            own = frozenset(re.findall(r"`(\w+)`", labels)) | (workers if heading == "Workers" else frozenset())
            if kind == "histogram":
                found |= {f"{name}_bucket": own | {"le"}, f"{name}_count": own, f"{name}_sum": own}
            else:
                found[name] = own
    return found


def exported(registries: Iterable[CollectorRegistry]) -> dict[str, frozenset[str]]:
    """Return the labels of each sample; of a metric that nothing has touched yet, as documented."""
    found: dict[str, frozenset[str]] = {}
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                found[sample.name] = frozenset(sample.labels)
            if not family.samples:
                name = f"{family.name}_total" if family.type == "counter" else family.name
                names = [f"{name}_bucket", f"{name}_count", f"{name}_sum"] if family.type == "histogram" else [name]
                found |= {each: documented()[each] for each in names}
    return found


async def after_some_requests() -> dict[str, frozenset[str]]:
    """Return the labels of what a router, workers of both roles and a planner export."""
    async with running_system(router={"http_port": 0, "policy": "longest_prefix"}) as system:
        async with system.client() as client:
            for number in range(3):
                await client.generate(f"ship {number} passes by night, {'slowly, ' * 20}", max_tokens=4)
        planner = PlanGauges()
        planner.set_sizes(present=PoolSizes(prefill=1, decode=1), wanted=PoolSizes(prefill=1, decode=2))
        planner.count_change("failed")
        registries = [system.router.door.parts.metrics.registry, planner.registry]
        for worker in system.workers.values():
            registry = CollectorRegistry()
            registry.register(RuntimeCollector(worker.runtime))
            registries.append(registry)
        return exported(registries)


@pytest.fixture(scope="module")
def metrics() -> Labels:
    return asyncio.run(after_some_requests())


@cache
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((_OBSERVABILITY / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    """Return each query with what shows its labels: a legend, or the texts of an alert."""
    found = [(str(rule["expr"]), json.dumps(rule.get("annotations", {}))) for rule in rules()]
    return found + [
        (query.expr, query.legend) for board in DASHBOARDS for panel in board.panels for query in panel.queries
    ]


def groupings(expr: str) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the labels of each `by (…)` with the expression that it groups."""
    for found in _GROUPING.finditer(expr):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expr[end], 0)
            end += 1
        yield frozenset(found[1].split(", ")), expr[found.end() : end]


def problems(expr: str, shows: str, known: Labels) -> list[str]:
    """Return what a query asks for and a cluster does not have."""
    values, found = known_values(), []
    selected = _SELECTOR.findall(expr)
    for name, matchers in selected:
        if name not in known:
            found.append(f"no metric {name}")
            continue
        for label, _operator, value in _MATCHER.findall(matchers):
            if label not in known[name] | _SCRAPED:
                found.append(f"{name} has no label {label}")
            elif unknown := set(value.split("|")) - values[name, label]:
                found.append(f"{name}: {label} is never {', '.join(sorted(unknown))}")
    grouped = list(groupings(expr))
    for labels, inner in grouped:
        for name, _matchers in _SELECTOR.findall(inner):
            if missing := labels - known.get(name, labels) - _SCRAPED:
                found.append(f"{name} cannot be grouped by {', '.join(sorted(missing))}")
    kept = [labels for labels, _ in grouped]
    if not kept and not _SUMMED.search(expr):
        kept = [known.get(name, frozenset()) for name, _matchers in selected]
    has = _SCRAPED.union(*kept)
    found += [f"shows {label}, which the query drops" for label in _SHOWN.findall(shows) if label not in has]
    return found


def with_recorded(known: Labels) -> Labels:
    """Return also the metrics that rules record, and Prometheus' own."""
    recorded = {
        str(rule["record"]): frozenset[str]().union(*(labels - {"le"} for labels, _ in groupings(rule["expr"])))
        for rule in rules()
        if "record" in rule
    }
    return {**known, **recorded, "up": _SCRAPED}


def test_every_query_of_dashboards_and_rules_finds_its_metrics_and_labels(metrics: Labels) -> None:
    known = with_recorded(metrics)
    assert len(queries()) > 60
    assert [(expr, problem) for expr, shows in queries() for problem in problems(expr, shows, known)] == []


@pytest.mark.parametrize(
    ("expr", "shows", "problem"),
    [
        ("sum(rate(kvrelay_request_total[5m]))", "", "no metric kvrelay_request_total"),
        ("sum by (pool) (rate(kvrelay_requests_total[5m]))", "", "kvrelay_requests_total cannot be grouped by pool"),
        ('rate(kvrelay_requests_total{reason="x"}[5m])', "", "kvrelay_requests_total has no label reason"),
        (
            'kvrelay_requests_total{outcome=~"bug|Overload"}',
            "",
            "kvrelay_requests_total: outcome is never Overload",
        ),
        ("sum(kvrelay_requests_total)", "{{outcome}}", "shows outcome, which the query drops"),
        ("sum by (le) (kvrelay_requests_total)", "{{le}}", "kvrelay_requests_total cannot be grouped by le"),
        ("max by (outcome) (kvrelay_requests_total)", "{{ $labels.kind }}", "shows kind, which the query drops"),
    ],
)
def test_query_that_would_show_nothing_is_found(expr: str, shows: str, problem: str) -> None:
    found = problems(expr, shows, {"kvrelay_requests_total": frozenset({"outcome"})})
    assert found == [problem]


def test_documented_labels_are_those_that_are_exported(metrics: Labels) -> None:
    table = documented()
    assert {name: labels for name, labels in metrics.items() if name in table and table[name] != labels} == {}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_dashboard_file_is_the_declared_one_and_its_panels_do_not_overlap(board: Any) -> None:
    path = FOLDER / f"{board.name}.json"
    text = path.read_text(encoding="utf-8")
    assert text == dict(documents())[path], "run `python -m deploy.observability.dashboards`"
    document = json.loads(text)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]}
    assert len(places) == len(document["panels"]) == len({panel["id"] for panel in document["panels"]})


def lost(given: Any, kept: Any, path: str = "dashboard") -> Iterator[str]:
    """Yield the paths whose values are not kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from lost(value, kept.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for position, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{position}]")
    elif given != kept:
        yield path


def through_grafana(document: Any) -> Any:
    """Return a dashboard as Grafana's own models read and write it: without any field that they do not know."""
    plugins.register_default_plugins()  # panels of time series, queries of Prometheus
    return json.loads(json.dumps(GrafanaDashboard.from_json(document), cls=JSONEncoder))


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_grafanas_own_models_know_every_field_of_a_dashboard(board: Any) -> None:
    document = board.as_json()
    assert list(lost(document, through_grafana(document))) == []


def test_fields_that_grafana_does_not_know_are_found() -> None:
    document = DASHBOARDS[0].as_json()
    panel = document["panels"][0]
    document["uuid"] = panel["titel"] = panel["fieldConfig"]["defaults"]["unti"] = "x"
    panel["options"]["legend"]["place"] = panel["targets"][0]["expression"] = "x"
    panels = "dashboard.panels[0]"
    assert set(lost(document, through_grafana(document))) == {
        "dashboard.uuid",
        f"{panels}.titel",
        f"{panels}.fieldConfig.defaults.unti",
        f"{panels}.options.legend.place",
        f"{panels}.targets[0].expression",
    }


def test_rules_are_prometheus_rules_and_alert_as_their_tests_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for command in (
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        ["test", "rules", "rules_test.yaml"],
    ):
        done = subprocess.run([promtool, *command], cwd=_OBSERVABILITY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
