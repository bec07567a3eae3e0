"""The live page: its files, and the states that fill it."""

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvrelay.v1.controller_pb2 import GetPlanResponse, PlanRecord, PoolPlan
from kvrelay.v1.router_admin_pb2 import SetWorkersRequest
from kvrelay.v1.worker_pb2 import WorkerStatus
from router.fleet.worker_client import WorkerClient
from router.http.exchange import Exchange
from router.http.page import handlers
from tests.browser import CHROMIUM, open_tab
from tests.router.fake_worker import DECODE, PREFILL, TIMEOUT_S, FakeWorker, pair
from tests.router.fakes import config_with, prompt_of
from tests.router.http.clients import HttpCluster, fetch, http_cluster
from tests.router.test_tenants import KEYS, serving


async def states(http: HttpCluster, count: int) -> list[dict[str, Any]]:
    """Return the first states of a stream, and leave it; fewer when the router ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET /cluster HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n")
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count and (line := await reader.readline()):
            if line.startswith(b"data: "):
                found.append(json.loads(line.removeprefix(b"data: ")))
    writer.close()
    return found


async def test_page_names_only_files_that_the_door_serves() -> None:
    async with http_cluster(FakeWorker("d0", DECODE)) as http:
        status, headers, body = await fetch(http.port, "GET", "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        named = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
        assert named == ["data:,", "page.css", "page.js"]
        for name in named[1:]:
            assert (await fetch(http.port, "GET", f"/{name}"))[0] == 200
        ids = set(re.findall(r'id="([a-z-]+)"', body.decode()))
        script = (await fetch(http.port, "GET", "/page.js"))[2].decode()
        assert set(re.findall(r'\$\("([a-z-]+)"\)', script)) <= ids


async def test_states_show_workers_and_answered_requests_with_their_stages() -> None:
    async with http_cluster(*pair()) as http:
        await http.complete()
        before, after = await states(http, 2)
        assert {worker["worker_id"] for worker in before["status"]["workers"]} == {"p0", "d0"}
        assert before["diagnosis"]["headline"].startswith("1 request answered in 60 s")
        (request,) = after["requests"]
        assert (request["tenant"], request["num_prompt_tokens"], request["num_output_tokens"]) == ("default", 10, 6)
        assert [stage for stage, _age_s in request["stages"]][-2:] == ["decoding", "finished"]
        assert after["decisions"][0]["request_id"] == request["request_id"]


async def test_state_asks_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    status = WorkerClient.status

    async def count(client: WorkerClient, *, timeout_s: float) -> WorkerStatus:
        asked.append(id(client))
        return await status(client, timeout_s=timeout_s)

    monkeypatch.setattr(WorkerClient, "status", count)
    async with http_cluster(*pair()) as http:
        asked.clear()
        assert (await fetch(http.port, "GET", "/cluster"))[0] == 200
        assert len(asked) == len(set(asked)) == 2


async def test_state_tells_what_the_planner_wanted_last_and_which_prefixes_are_reused() -> None:
    async with http_cluster(*pair()) as http:
        assert (await states(http, 1))[0]["status"].get("planner") is None
        latest = PlanRecord(age_s=3.0, prefill=PoolPlan(present=1, wanted=2), reason="prompts wait")
        told = GetPlanResponse(mode="advise", interval_s=15.0, latest=latest)
        cluster = http.cluster
        endpoints = [worker.endpoint for worker in cluster.workers.values()]
        await cluster.admin.SetWorkers(SetWorkersRequest(workers=endpoints, planner=told))
        await cluster.admin.SetWorkers(SetWorkersRequest(workers=endpoints))
        for _ in range(2):
            await http.complete(prompt=prompt_of(40))
        _, state = await states(http, 2)
    planner = state["status"]["planner"]
    assert (planner["mode"], planner["latest"]["prefill"]["wanted"]) == ("advise", 2)
    assert planner["latest"]["age_s"] >= 3.0
    (prefix,) = state["status"]["router"]["hot_prefixes"]
    assert prefix["num_blocks"] > 0
    assert prefix["holders"][0]["worker_id"] in ("p0", "d0")


async def test_state_is_for_operators() -> None:
    async with http_cluster(*pair(), config=serving(a={"operator": True}, http_port=0)) as http:
        for key, status in ((KEYS["a"], 200), (KEYS["b"], 403), ("nobody", 401)):
            assert (await fetch(http.port, "GET", "/cluster", authorization=f"Bearer {key}"))[0] == status


@pytest.mark.parametrize("path", ["/", "/page.js", "/cluster"])
async def test_page_that_is_off_is_not_there(path: str) -> None:
    async with http_cluster(*pair(), config=config_with(http_port=0, live_page=False)) as http:
        assert (await fetch(http.port, "GET", path))[0] == 404


async def test_watcher_beyond_the_limit_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MAX_WATCHERS", 0)
    async with http_cluster(*pair()) as http:
        status, headers, _body = await fetch(http.port, "GET", "/cluster", accept="text/event-stream")
        assert (status, headers["retry-after"]) == (503, "10")
        assert (await fetch(http.port, "GET", "/cluster"))[0] == 200, "a single state takes no place"


async def test_router_that_stops_does_not_wait_for_a_watcher_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_stuck = asyncio.Event()

    async def write(_exchange: Exchange, _events: bytes) -> None:
        is_stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Exchange, "write", write)
    async with http_cluster(*pair()) as http:
        watching = asyncio.ensure_future(fetch(http.port, "GET", "/cluster", accept="text/event-stream"))
        async with asyncio.timeout(TIMEOUT_S):
            await is_stuck.wait()
            await http.cluster.router.stop(10 * TIMEOUT_S)
            assert (await watching)[0] == 503


async def test_router_that_stops_does_not_wait_for_watchers() -> None:
    async with http_cluster(*pair()) as http:
        watching = asyncio.ensure_future(states(http, 1000))
        await states(http, 1)
        async with asyncio.timeout(TIMEOUT_S):
            await http.cluster.router.stop(10 * TIMEOUT_S)
        assert 1 <= len(await watching) < 1000


class Elements(HTMLParser):
    """The elements of a page: tag, attributes, and the text inside."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.all:
            self.all[-1][2].append(data.strip())

    def of(self, *tags: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, "".join(texts)) for tag, attrs, texts in self.all if tag in tags]


def test_every_control_has_a_name_and_is_reached_by_the_keyboard() -> None:
    static = Path(handlers.__file__).parent / "static"
    elements = Elements((static / "page.html").read_text(encoding="utf-8"))
    labels = {attrs["for"]: text for attrs, text in elements.of("label")}
    fields = [attrs for attrs, _text in elements.of("input", "textarea", "select") if "hidden" not in attrs]
    assert fields
    assert all(labels[field["id"]] for field in fields)
    assert all(text for _attrs, text in elements.of("button"))
    ids = {attrs["id"] for _tag, attrs, _texts in elements.all if "id" in attrs}
    for tag, attrs, _texts in elements.all:
        if "scroll" in (attrs.get("class") or ""):  # else only a pointer could move what does not fit
            assert (attrs.get("tabindex"), attrs.get("role")) == ("0", "region"), tag
        assert attrs.get("tabindex", "0") == "0", "an order of its own would surprise"
        assert set((attrs.get("aria-labelledby") or "").split()) <= ids
    listeners = re.findall(r'addEventListener\("(\w+)"', (static / "page.js").read_text(encoding="utf-8"))
    assert set(listeners) == {"submit", "toggle"}, "a listener for clicks alone would leave out the keyboard"


def _luminance(color: str) -> float:
    """Return the relative luminance of #rgb or #rrggbb (WCAG 2.2)."""
    digits = color if len(color) == 6 else "".join(2 * digit for digit in color)
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_and_bars_stand_out_from_both_grounds_in_light_and_dark() -> None:
    """WCAG 2.2, level AA: 4.5:1 for text (1.4.3), 3:1 for graphics (1.4.11)."""
    css = (Path(handlers.__file__).parent / "static" / "page.css").read_text(encoding="utf-8")
    schemes = [dict(re.findall(r"--(\w+): #(\w+);", part)) for part in re.findall(r"--ground:[^}]*", css)]
    assert len(schemes) == 2
    needed = dict.fromkeys(("ink", "soft", "bad"), 4.5)
    needed |= dict.fromkeys(("queued", "reserving", "prefilling", "handoff", "decoding"), 3.0)
    for scheme in schemes:
        for name, least in needed.items():
            for ground in ("ground", "panel"):
                dim, bright = sorted((_luminance(scheme[name]), _luminance(scheme[ground])))
                assert (bright + 0.05) / (dim + 0.05) >= least, f"--{name} on --{ground} of {scheme}"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
async def test_page_follows_a_cluster_chats_and_shows_a_worker_that_was_killed() -> None:
    workers = [FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)]
    async with http_cluster(*workers) as http, open_tab() as tab:
        await tab.show(width=360)
        await tab.open(f"{http.url}/")
        await tab.until("document.querySelectorAll('#workers tr').length === 3")
        await tab.until("document.querySelector('#requests').innerText === 'none'")

        await tab.until("document.querySelector('#history').textContent.match(/first point comes|Output tokens/)")
        await http.complete()
        http.cluster.router.door.parts.history.add_point()
        await tab.until("document.querySelector('#history').textContent.match(/Output tokens per second: [0-9]/)")
        await tab.until("document.querySelectorAll('#decisions tr').length === 1")
        await tab.until("document.querySelector('#requests').innerText.includes('finished')")
        assert "No controller" in await tab.evaluate("document.querySelector('#plan').textContent")

        await tab.evaluate("document.querySelector('#prompt').value = 'hi'")
        await tab.evaluate("document.querySelector('#chat').requestSubmit()")
        await tab.until("document.querySelector('#report').innerText.includes('handoff')")
        assert "p0 → d" in await tab.evaluate("document.querySelector('#report').innerText")

        gone = next(worker for worker in workers if worker.worker_id == "d1")
        await gone.die()
        await tab.until("document.querySelector('#workers .bad')?.textContent === 'lost'")
        assert await tab.evaluate("document.querySelector('#workers .bad').closest('tr').innerText.startsWith('d1')")

        assert await tab.evaluate("document.documentElement.scrollWidth") <= 360, "nothing is cut off at 360 pixels"
        await tab.evaluate("globalThis.named = (each) => each.ariaLabel || each.getAttribute('aria-labelledby')")
        marked = "[...document.querySelectorAll('section, [role=img], [role=region]')]"
        assert await tab.evaluate(f"{marked}.filter((each) => !named(each)).length") == 0
        assert not tab.errors
        assert all(address.startswith((http.url, "data:")) for address in tab.addresses), tab.addresses
