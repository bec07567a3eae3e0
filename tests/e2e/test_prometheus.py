"""Prometheus scrapes a running cluster by deploy/observability; every query of dashboards and rules returns data."""

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.ports import free_port
from deploy.observability.dashboards import DASHBOARDS
from kvrelay.client import AsyncClient
from tests.e2e.harness import fake_config, running_cluster, until

pytestmark = pytest.mark.e2e

_OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
_METRIC = re.compile(r"\b(?:\w+:)?kvrelay_\w+(?::\w+)?")
_LISTENS = re.compile(rb'msg="Listening on" address=(\S+)')
NEEDS_AN_EVENT = frozenset(
    {
        "kvrelay_leases_expired_total",
        "kvrelay_planner_changes_total",
        "kvrelay_prefix_pulls_total",
        "kvrelay_replans_total",
        "kvrelay_tenant_refusals_total",
        "kvrelay_worker_refusals_total",
    }
)
"""Counters without a series until what they count has happened, which here it does not."""
OF_A_BUSY_MACHINE = frozenset({"KvrelayEventLoopLags", "KvrelayTargetDown"})
"""Alerts that may wait to fire here, because other tests keep the cores busy."""


def expressions() -> list[str]:
    """Return every query: of dashboards as Grafana sends it, and what rules record."""
    rules = yaml.safe_load((_OBSERVABILITY / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    found = [query.expr for board in DASHBOARDS for panel in board.panels for query in panel.queries]
    found += [rule["record"] for group in rules for rule in group["rules"] if "record" in rule]
    return [expr.replace("$__rate_interval", "1m") for expr in found]


def targets(run_dir: Path, planner_port: int) -> list[dict[str, Any]]:
    """Return what the command in docs/metrics.md writes into targets.json, and the planner."""
    state = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))
    places = [(each["name"], each["address"].rpartition(":")[0], each["metrics_port"]) for each in state["processes"]]
    places.append(("planner", "127.0.0.1", planner_port))
    return [{"targets": [f"{host}:{port}"], "labels": {"process": name}} for name, host, port in places]


def configuration(folder: Path, run_dir: Path, planner_port: int) -> Path:
    """Write the project's configuration, with shorter intervals, and the targets of a cluster."""
    config = yaml.safe_load((_OBSERVABILITY / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], "1s")
    shutil.copy(_OBSERVABILITY / "rules.yaml", folder)
    (folder / "targets.json").write_text(json.dumps(targets(run_dir, planner_port)), encoding="utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "prometheus.yaml"


@asynccontextmanager
async def running_prometheus(config: Path) -> AsyncIterator[str]:
    """Run Prometheus on a free port; yields its URL."""
    data = config.parent / "data"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={data}", "--web.listen-address=127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec("prometheus", *flags, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = b""
        while (found := _LISTENS.search(said)) is None:
            line = await process.stderr.readline()
            assert line, said.decode()
            said += line
        draining = asyncio.ensure_future(process.stderr.read())
        yield f"http://{found[1].decode()}"
    finally:
        process.terminate()
        await process.wait()
    await draining


def ask(url: str, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus' API."""
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=30) as answer:
        return json.load(answer)["data"]


def drop_answered(url: str, pending: list[str]) -> None:
    """Remove queries from the end of a list as long as they return data."""
    while pending and ask(url, "query", query=pending[-1])["result"]:
        pending.pop()


async def ask_for_something(client: AsyncClient, number: int) -> None:
    """Send a prompt that is handed over, and its beginning again, which is cached."""
    prompt = [(each * 7 + number) % 256 for each in range(300)]
    for length in (300, 280):
        await client.generate(prompt[:length], temperature=0, max_tokens=8, ignore_eos=True)


def see_if_it_lives(run_dir: Path) -> None:
    """Send the HTTP door something."""
    (address,) = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))["http_addresses"]
    with urllib.request.urlopen(f"http://{address}/live", timeout=30) as answer:
        answer.read()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
async def test_every_query_of_dashboards_and_rules_returns_data_of_a_running_cluster(tmp_path: Path) -> None:
    planner_port = free_port("127.0.0.1")
    planner = {"mode": "advise", "interval_s": 1.0, "metrics_port": planner_port}
    router = {"port": 0, "policy": "predictive", "local_prefill_max_tokens": 32}
    loop = asyncio.get_running_loop()
    async with running_cluster(tmp_path, fake_config(router=router, planner=planner, step_ms=0.0)) as client:
        config = configuration(tmp_path, tmp_path / "run", planner_port)
        check_exposition(targets(tmp_path / "run", planner_port))
        async with running_prometheus(config) as url:
            numbers = itertools.count()
            pending = [expr for expr in expressions() if not NEEDS_AN_EVENT & set(_METRIC.findall(expr))]
            assert len(pending) > 50

            async def all_return_data() -> bool:
                await ask_for_something(client, next(numbers))
                await loop.run_in_executor(None, see_if_it_lives, tmp_path / "run")
                await loop.run_in_executor(None, drop_answered, url, pending)
                return not pending

            try:
                await until(all_return_data, timeout_s=180, what="every query returns data", poll_s=0.5)
            except AssertionError:
                raise AssertionError(f"no data: {pending[-1]}") from None

            names = ("router-0", "prefill-0", "decode-0", "planner")

            async def all_are_up() -> bool:
                up = await loop.run_in_executor(None, partial(ask, url, "query", query="up"))
                return {each["metric"]["process"]: each["value"][1] for each in up["result"]} == dict.fromkeys(
                    names, "1"
                )

            await until(all_are_up, timeout_s=60, what="every process is scraped")  # a busy one may miss its second
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
            alerts = {alert["labels"]["alertname"] for alert in ask(url, "alerts")["alerts"]}
            assert alerts <= OF_A_BUSY_MACHINE


def check_exposition(scraped: list[dict[str, Any]]) -> None:
    """Fail unless promtool finds the names and types of all metrics in order."""
    for each in scraped:
        with urllib.request.urlopen(f"http://{each['targets'][0]}/metrics", timeout=30) as answer:
            text = answer.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, b""), each
