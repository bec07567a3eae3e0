"""The live page in a browser: it loads, follows the cluster, chats, and shows a worker that is gone."""

import pytest

from tests.browser import CHROMIUM, open_tab
from tests.router.fakes import DECODE, PREFILL, FakeWorker
from tests.router.http.clients import http_cluster

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


async def test_page_follows_a_cluster_chats_and_shows_a_worker_that_was_killed() -> None:
    workers = [FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE), FakeWorker("d1", DECODE)]
    async with http_cluster(*workers) as http, open_tab() as tab:
        await tab.show(width=360)
        await tab.open(f"{http.url}/")
        await tab.until("document.querySelectorAll('#workers tr').length === 3")
        await tab.until("document.querySelector('#requests').innerText === 'none'")

        await http.complete()
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
