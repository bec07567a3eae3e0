import json

from cli.roofline import _of_host as of_host
from kvrelay.client import WorkerView
from kvrelay.client.convert import record
from kvrelay.v1 import worker_pb2
from tests.cli.conftest import Run
from tests.client.fake_server import FakeInference
from tests.client.messages import worker_view


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
    assert rows["pinned tokens"] == ["–", "512, 64 refused"]
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
        "tpot_s": 0.03,
        "ended": "completed",
        "num_drafted_tokens": 50,
        "num_accepted_tokens": 40,
        "num_pinned_tokens": 512,
        "num_refused_pin_tokens": 64,
    }
    assert running["outcome"]["ended"] is None


def test_explain_of_an_unknown_request_says_so_and_fails(run: Run, fake: FakeInference, address: str) -> None:
    fake.decisions = []
    result = run("explain", "req-9", "-a", address)
    assert result.exit_code == 1
    assert "remembers no decision of this tenant on req-9" in result.stderr


def test_roofline_holds_fitted_and_measured_steps_against_the_bounds_of_the_device(run: Run, address: str) -> None:
    result = run("roofline", "-a", address)
    assert result.exit_code == 0
    headline, links, *lines = result.stdout.splitlines()
    assert headline == (
        "prefill-0: memory 1.0 GB/s, arithmetic 1.00 TFLOP/s, weights 95 MiB, KV 1.0 KiB a token;"
        " above 100.0 rows a step is bound by arithmetic"
    )
    assert links == (
        "KV pulled by shm 8 GB/s between pages of this host, 6 GB/s from decode-1 (12 pulls);"
        " grpc 2 GB/s between pages of this host"
    )
    rows = {cells(line)[0]: cells(line)[1:] for line in lines if "│" in line}
    assert rows["decode 1, 1024 tokens each"] == ["101 ms", "1.0 ms", "memory", "200 ms", "51%"]
    assert rows["decode, mean of 10 measured"] == ["200 ms", "50.0 ms", "memory", "400 ms", "50%"]
    assert "prefill" not in " ".join(rows)  # its model is a guess


def test_roofline_as_json_has_the_rows_of_the_table(run: Run, address: str) -> None:
    (worker, *_) = json.loads(run("roofline", "-a", address, "--json").stdout)
    assert worker["device"]["read_bytes_per_s"] > 0
    row = worker["steps"][0]
    assert row["share_of_bound"] == max(row["memory_s"], row["arithmetic_s"]) / row["taken_s"]


def test_roofline_of_a_worker_with_busy_neighbours_has_the_rates_of_its_host() -> None:
    def measured(host: str, read_bytes_per_s: float) -> WorkerView:
        view = worker_view("w", worker_pb2.WORKER_ROLE_DECODE)
        view.address, view.status.device.num_cores = f"{host}:7001", 1
        view.status.device.read_bytes_per_s = read_bytes_per_s
        return record(WorkerView, view)

    workers = [measured("10.0.0.1", 5e9), measured("10.0.0.1", 11e9), measured("10.0.0.2", 20e9)]
    floors = [of_host(worker, workers).read_bytes_per_s for worker in workers]
    assert floors == [11e9, 11e9, 20e9], "its steps would take less than the least time that they can take"


def test_why_numbers_the_causes_with_what_they_cost_and_the_changes_that_help(run: Run, address: str) -> None:
    result = run("why", "--window", "60", "-a", address)
    assert result.exit_code == 0
    headline, *lines = result.stdout.splitlines()
    assert headline == "requests of 60 s"
    assert lines[0] == "4 requests wait in line"
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "the pace of answers" in line]
    assert cells == [
        ["batch", "the pace of answers", "4", "8.00 s", "0", "0.0 ms"],
        ["chat", "the pace of answers", "0", "0.0 ms", "2", "1.50 s"],
    ]
    walls, findings = lines[:-3], lines[-3:]
    assert [line.split()[0] for line in walls if "1 min" in line] == ["prefill", "decode"]
    assert "waiting" in walls[-1]
    assert findings == [
        "1. prefill (1.5 s a request): prompts wait 1.5 s",
        "   - a prefill worker more: …",
        "2. decode (0.5 s a request): a gap is 20 ms",
    ]


def test_why_of_a_pool_leaves_the_other_out(run: Run, address: str) -> None:
    assert run("why", "--pool", "decode", "-a", address).stdout.splitlines()[-1:] == [
        "1. decode (0.5 s a request): a gap is 20 ms"
    ]
    assert "prefill" not in run("why", "--pool", "decode", "-a", address).stdout
    assert run("why", "--pool", "router", "-a", address).exit_code == 2


def test_why_of_a_request_lists_the_parts_of_its_time(run: Run, address: str) -> None:
    result = run("why", "--request", "req-7", "-a", address)
    assert result.stdout.splitlines() == ["req-7: 3 s in all", "1. prefill: 2 s, usually 0.1 s"]
    assert run("why", "--request", "req-7", "--pool", "decode", "-a", address).exit_code == 2


def test_why_as_json_has_every_figure(run: Run, address: str) -> None:
    diagnosis = json.loads(run("why", "--json", "-a", address).stdout)
    assert [finding["lost_s"] for finding in diagnosis["findings"]] == [1.5, 0.5]
