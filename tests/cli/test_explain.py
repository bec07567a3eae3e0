import json

from tests.cli.conftest import Run
from tests.client.fake_server import FakeInference


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")]


def test_explain_shows_candidates_choice_and_predicted_beside_actual(run: Run, address: str) -> None:
    result = run("explain", "-a", address)
    assert result.exit_code == 0
    complete, _, running = result.stdout.partition("req-0 ·")
    assert "req-1 · attempt 1 · 90.00 s ago · completed" in complete
    assert "policy predictive: 1000 tokens, 6 options in 0.4 ms, 1.00 s after receipt" in complete
    assert "chosen remote prefill-0 → decode-1 (least cost)" in complete
    rows = {cells(line)[0]: cells(line)[1:] for line in complete.splitlines() if "│" in line or "┃" in line}
    assert rows["candidate"] == ["pull from", "cost", "prefill", "queue"]
    assert rows["remote prefill-0 → decode-1"] == ["decode-0", "0.5", "0.375", "0.125"]
    assert rows["local decode-0"] == ["", "2", "", "2"]
    assert rows["cached tokens"] == ["640", "608"]
    assert rows["choice to first token"] == ["500 ms", "625 ms"]
    assert rows["receipt to first token"] == ["1.50 s (1.25 s to 2.00 s)", "1.62 s"]
    assert rows["… on entering the line"] == ["3.00 s", "1.62 s"]
    assert rows["gap between tokens"] == ["25.0 ms (20.0 ms to 50.0 ms)", "30.0 ms"]
    assert "attempt 2" in running
    assert "running" in running
    assert {cells(line)[0]: cells(line)[1:] for line in running.splitlines() if "│" in line} == {
        "cached tokens": ["0", "–"],
        "choice to first token": ["–", "–"],
        "receipt to first token": ["–", "–"],
        "… on entering the line": ["–", "–"],
        "gap between tokens": ["–", "–"],
    }


def test_explain_asks_for_one_request_and_a_number_of_decisions(run: Run, fake: FakeInference, address: str) -> None:
    run("explain", "req-1", "--last", "7", "-a", address)
    (asked,) = fake.explain_requests
    assert (asked.request_id, asked.limit) == ("req-1", 7)


def test_explain_as_json_has_every_field(run: Run, address: str) -> None:
    complete, running = json.loads(run("explain", "-a", address, "--json").stdout)
    assert complete["candidates"][0]["terms"] == {"queue": 0.125, "prefill": 0.375}
    assert complete["outcome"] == {
        "num_cached_tokens": 608,
        "ttft_s": 0.625,
        "mean_itl_s": 0.03,
        "ended": "completed",
        "num_drafted_tokens": 50,
        "num_accepted_tokens": 40,
    }
    assert running["outcome"]["ended"] is None


def test_explain_of_an_unknown_request_says_so_and_fails(run: Run, fake: FakeInference, address: str) -> None:
    fake.decisions = []
    result = run("explain", "req-9", "-a", address)
    assert result.exit_code == 1
    assert "remembers no decision on req-9" in result.stderr
