import json
import re
from pathlib import Path

import pytest

from measure.experiment.store import Store
from tests.cli.conftest import Run

SMALL = str(Path(__file__).parents[1] / "data" / "small.jsonl")


def slowest(folder: Path, policy: str) -> Path:
    """Return the folder of a policy's run at the lowest speed."""
    store = Store(folder / "out")
    point = min((point for point in store.points() if point.arm.name == policy), key=lambda point: point.load)
    return store.folder(point.source, point.cell)


def test_simulate_compares_policies_and_leaves_table_page_and_requests(run: Run, folder: Path) -> None:
    arguments = ("simulate", "-t", SMALL, "-n", "25", "-p", "round_robin,predictive", "-w", "1P1D", "-s", "0.5,1")
    result = run(*arguments, "-o", "out")
    assert result.exit_code == 0, result.output
    assert "[4/4]" in result.stderr
    assert result.stdout.count("round_robin") == 2
    assert "at the choice: off, held" in result.stdout
    assert (folder / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "out" / "table.txt").exists()
    lines = (slowest(folder, "predictive") / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 25
    assert json.loads(lines[3])["index"] == 3


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_simulate_says_within_seconds_how_far_it_is(run: Run, jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.experiment._REPORT_REQUESTS_S", 0.01)
    result = run("simulate", "-t", SMALL, "-n", "25", "-p", "round_robin,predictive", "-o", "out", "-j", jobs)
    assert result.exit_code == 0, result.output
    told = [int(count) for count in re.findall(r"(\d+) requests have ended", result.stderr)]
    assert told == sorted(told)
    assert any(0 < count < 50 for count in told)


def test_simulate_with_bound_tells_how_much_of_it_each_policy_reaches(run: Run, folder: Path) -> None:
    arguments = ("simulate", "-t", SMALL, "-n", "25", "-p", "round_robin", "-w", "1P1D", "-s", "1,40", "--bound")
    result = run(*arguments, "-o", "out")
    assert result.exit_code == 0, result.output
    bounds = json.loads((folder / "out" / "bounds.json").read_text())
    assert 0 < bounds["40"]["num_good"] < bounds["1"]["num_good"] <= bounds["1"]["num_requests"] == 25
    points = sorted(Store(folder / "out").points(), key=lambda point: point.load)
    num_good = [point.overall.num_good for point in points]
    assert all(good <= bound["num_good"] for good, bound in zip(num_good, bounds.values(), strict=True))
    for output in (result.stdout, (folder / "out" / "table.txt").read_text()):
        assert "of bound %" in output
    assert "bound" not in run(*arguments[:-1], "-o", "out").stdout


def write_sessions(folder: Path, num_sessions: int) -> str:
    """Write sessions of three requests, with a sub-agent beside the second one."""
    requests = [
        {"t": 0, "in": 2100, "out": 30, "think_s": 0, "api_s": 1, "new": []},
        {"t": 3, "in": 700, "out": 20, "think_s": None, "api_s": 1, "agent": "a", "new": []},
        {"t": 5, "in": 3000, "out": 25, "think_s": 4, "api_s": 1, "like": [0, 32], "new": []},
        {"t": 9, "in": 3200, "out": 25, "think_s": 3, "api_s": 1, "like": [2, 46], "new": []},
    ]
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps({"session": f"s{n}", "requests": requests}) + "\n" for n in range(num_sessions)))
    return str(path)


def test_simulate_plays_sessions_as_closed_loops_and_says_how_they_went(run: Run, folder: Path) -> None:
    arguments = ("simulate", "-t", write_sessions(folder, 6), "-w", "1P1D", "--block-size", "64", "--ramp", "2")
    result = run(*arguments, "--sessions", "1,3", "-p", "predictive,session_affinity,lmetric", "-o", "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("6 of 6") == 6
    points = list(Store(folder / "out").points())
    for point in points:
        assert point.sessions is not None
        assert point.sessions.num_good == 6
        assert point.sessions.stretch is not None
    alone = next(point.sessions for point in points if point.load == 1 and point.arm.name == "predictive")
    assert alone is not None
    assert alone.stretch is not None
    assert alone.stretch.p50 == pytest.approx(1.0, abs=0.05)
    page = (folder / "out" / "report.html").read_text()
    assert "Interactivity and throughput" in page
    assert "Capacity for each" not in page
    again = run(*arguments, "--per-hour", "600", "-p", "predictive", "-o", "hourly")
    assert again.exit_code == 0, again.output
    assert "600 sessions/h" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --sessions N"),
        (("--sessions", "1", "--per-hour", "2"), "give one of --sessions N"),
        (("--sessions", "1", "-s", "1,2"), "--speed divides the pauses of sessions"),
        (("--sessions", "1", "--bound"), "--bound is for traces"),
        (("--sessions", "1", "--longest", "10"), "short enough"),
        (("--sessions", "1.5"), "--sessions: '1.5'; say whole numbers"),
    ],
)
def test_simulate_refuses_options_that_sessions_do_not_have(
    run: Run, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run("simulate", "-t", write_sessions(folder, 1), "-p", "round_robin", "-o", "out", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")


def test_trace_stats_of_sessions_are_lengths_reuse_and_pauses(run: Run, folder: Path) -> None:
    result = run("trace", "stats", write_sessions(folder, 3), "--limit", "2")
    assert result.exit_code == 0, result.output
    assert "2, 2 of them with sub-agents" in result.stdout
    assert re.search(r"requests +8; of a session mean 4", result.stdout)
    assert re.search(r"infinite-cache hit +57\.28", result.stdout)
    (folder / "sessions.jsonl").write_text('{"requests": 3}\n')
    assert "requests: Input should be a valid array" in run("trace", "stats", "sessions.jsonl").stderr.replace(
        "\n", " "
    )


def test_simulate_refuses_options_for_sessions_with_a_trace_of_requests(run: Run) -> None:
    result = run("simulate", "-t", SMALL, "-p", "round_robin", "-o", "out", "--sessions", "3")
    assert "has no sessions" in result.stderr.replace("\n", " ")


def test_simulate_aggregated_puts_all_workers_in_one_pool(run: Run, folder: Path) -> None:
    result = run("simulate", "-t", SMALL, "-n", "8", "-p", "round_robin", "-w", "1P1D", "--aggregated", "-o", "out")
    assert result.exit_code == 0, result.output
    workers = json.loads((slowest(folder, "round_robin") / "workers.json").read_text())
    assert [worker["worker_id"] for worker in workers] == ["decode-0", "decode-1"]


def test_simulate_with_a_timing_file_takes_times_and_step_budget_from_it(run: Run, folder: Path) -> None:
    step = '{"constant_s": 0.25}'
    (folder / "slow.json").write_text(
        f'{{"prefill": {step}, "decode": {step}, "max_step_tokens": 4096, "kv_bytes_per_token": 1024,'
        ' "link": {"latency_s": 0.001, "bytes_per_s": 1e9}}'
    )
    result = run("simulate", "-t", SMALL, "-n", "1", "-p", "round_robin", "--timing", "slow.json", "-o", "out")
    assert result.exit_code == 0, result.output
    only = json.loads((slowest(folder, "round_robin") / "requests.jsonl").read_text())
    num_prefill_steps = -(-only["num_prompt_tokens"] // 4096)
    first_s, last_s = only["chunk_s"]
    assert first_s == pytest.approx(0.25 * num_prefill_steps, abs=0.05)
    assert last_s - first_s == pytest.approx(0.25 * (sum(only["chunk_tokens"]) - 1), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-p", "best"), "--policy: 'best' is not a policy; known are predictive, "),
        (("-s", "1,fast"), "--speed: '1,fast'; say positive numbers"),
        (("-s", "0"), "--speed: '0'; say positive numbers"),
        (("-w", "many"), "--workers: 'many' names no workers; say 4P4D"),
        (("-m", "gpt"), "--model: 'gpt' is not known; say one of llama-70b"),
        (("--device", "abacus"), "--device: 'abacus' is not known; say one of h100"),
        (("--tiers", "512@fast"), "--tiers: '512@fast' is not GiB@GB/s, such as 512@20"),
        (("--block-size", "96"), "pages of 96 tokens do not divide"),
        (("-t", "none.jsonl"), "none.jsonl: No such file or directory"),
        (("--timing", SMALL), "small.jsonl: "),
    ],
)
def test_simulate_with_a_bad_option_says_what_to_do(run: Run, arguments: tuple[str, ...], complaint: str) -> None:
    result = run("simulate", "-t", SMALL, "-n", "2", "-p", "round_robin", "-o", "out", *arguments)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_simulate_in_a_folder_of_other_settings_names_what_differs(run: Run) -> None:
    arguments = ("simulate", "-t", SMALL, "-n", "3", "-p", "round_robin", "-o", "out")
    assert run(*arguments).exit_code == 0
    refused = run(*arguments, "--seed", "1")
    assert refused.exit_code == 1
    assert "out holds results of other settings (simulated seed differ)" in refused.stderr
    assert run(*arguments, "--seed", "1", "--again").exit_code == 0


def test_trace_stats_prints_rates_lengths_and_hits(run: Run) -> None:
    result = run("trace", "stats", SMALL, "--workers", "4")
    assert result.exit_code == 0
    for text in ("800", "infinite-cache hit", "round robin, 4 × 3,000 blocks", "sticky, 4 × 3,000 blocks"):
        assert text in result.stdout


def test_trace_stats_of_a_bad_row_names_file_and_line(run: Run, folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"timestamp": 0}\n')
    result = run("trace", "stats", "bad.jsonl")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: bad.jsonl:1: input_length: Field required")


def test_trace_synth_writes_the_same_trace_for_the_same_seed(run: Run, folder: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert run("trace", "synth", f"{name}.jsonl", "-n", "30", "--seed", seed).exit_code == 0
    first, second, other = ((folder / f"{name}.jsonl").read_text() for name in "abc")
    assert first == second != other
    assert len(first.splitlines()) == 30


def test_trace_synth_refuses_a_name_that_no_reader_takes(run: Run) -> None:
    result = run("trace", "synth", "a.csv")
    assert result.exit_code == 1
    assert "a.csv: a trace in this format must end in .jsonl" in result.stderr
