"""`kvrelay bench run`: what its options send, what it prints and what it leaves behind."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from common.errors import Unreachable
from measure.load.records import Run as LoadRun
from measure.load.spec import LoadSpec, LoadTestFailed, Observer
from measure.load.store import read_run
from tests.cli.conftest import FakeLifecycle, Run
from tests.e2e.in_process import running_system
from tests.measure.load.made_runs import made_run


class FakeLoad:
    """measure.load.run.run_load without a server: answers 40 requests a second apart, some of them badly."""

    def __init__(self) -> None:
        self.specs: list[LoadSpec] = []
        self.num_refused = 0
        self.error: Exception | None = None
        self.interrupts_itself = False

    @property
    def spec(self) -> LoadSpec:
        (spec,) = self.specs
        return spec

    async def __call__(self, spec: LoadSpec, *observers: Observer, stop: asyncio.Event) -> LoadRun:
        self.specs.append(spec)
        if self.error is not None:
            raise self.error
        run = made_run(name=spec.name, num_refused=self.num_refused)
        for request in run.requests:
            for observer in observers:
                observer.record(request)
        if self.interrupts_itself:
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(60):
                await stop.wait()
        return run


@pytest.fixture
def load(lifecycle: FakeLifecycle, monkeypatch: pytest.MonkeyPatch) -> FakeLoad:
    lifecycle.running.add(lifecycle.default_run_dir("kvrelay"))
    fake = FakeLoad()
    monkeypatch.setattr("measure.load.run.run_load", fake)
    return fake


def test_bench_run_prints_the_summary_and_keeps_everything(run: Run, load: FakeLoad, folder: Path) -> None:
    result = run("bench", "run", "--out", "here")
    assert result.exit_code == 0, result.output
    assert "SLOs are met: 100.0 % good" in result.stdout
    assert "Every request is in here" in result.stderr
    assert sorted(path.name for path in (folder / "here").iterdir()) == [
        "report.html",
        "requests.jsonl",
        "run.json",
        "samples.jsonl",
        "summary.json",
    ]
    assert len(read_run(folder / "here").requests) == 40


def test_bench_run_by_default_sends_a_minute_of_one_request_a_second(
    run: Run, load: FakeLoad, lifecycle: FakeLifecycle, folder: Path
) -> None:
    lifecycle.address = "127.0.0.1:7777"
    assert run("bench", "run", "--no-report").exit_code == 0
    assert (load.spec.name, load.spec.target.url) == ("rate-1", "127.0.0.1:7777")
    assert load.spec.workload.duration_s == 60.0
    assert load.spec.specification["streams"][0]["arrivals"]["rate"] == 1.0
    assert load.spec.slo is None
    (results,) = (folder / "bench-results").iterdir()
    assert results.name.startswith("rate-1-")
    assert not (results / "report.html").exists()


def test_bench_run_never_writes_over_results(run: Run, load: FakeLoad) -> None:
    assert run("bench", "run", "--out", "here", "--no-report").exit_code == 0
    again = run("bench", "run", "--out", "here", "--no-report")
    assert again.exit_code == 1
    assert "here: holds the results of another run" in again.stderr
    assert len(load.specs) == 1


def test_bench_run_options_make_the_workload(run: Run, load: FakeLoad) -> None:
    options = "--rate 3 --burstiness 0.5 --duration 20 --requests 99 --prompt-tokens 300 --output-tokens uniform:5,9"
    options += " --turns 4 --think 2 --prefix-tokens 64 --prefix-share 0.5 --prefix-count 3 --content chat --seed 7"
    assert run("bench", "run", "--out", "here", "--no-report", *options.split()).exit_code == 0
    spec = load.spec.specification
    assert (spec["content"], spec["seed"], spec["duration_s"], spec["max_requests"]) == ("chat", 7, 20.0, 99)
    (stream,) = spec["streams"]
    assert (stream["arrivals"]["process"], stream["arrivals"]["burstiness"]) == ("gamma", 0.5)
    assert (stream["first_tokens"], stream["output_tokens"], stream["turns"]) == ("300", "uniform:5,9", "4")
    assert (stream["think_s"], stream["turn_tokens"]) == ("2", "lognormal:40,0.6,max=200")
    assert stream["prefix"] == {"share": 0.5, "tokens": "64", "count": 3, "zipf": 0.0}
    assert load.spec.workload.seed == 7


def test_bench_run_with_concurrency_is_a_closed_loop(run: Run, load: FakeLoad) -> None:
    assert run("bench", "run", "--out", "here", "--no-report", "-k", "16").exit_code == 0
    assert load.spec.workload.streams[0].concurrency == 16
    assert load.spec.name == "concurrency-16"


@pytest.mark.parametrize(("options", "tells"), [([], True), (["--no-tell-objectives"], False)])
def test_bench_run_judges_by_the_objectives_and_tells_them_unless_told_not_to(
    run: Run, load: FakeLoad, options: list[str], tells: bool
) -> None:
    result = run("bench", "run", "--out", "here", "--no-report", "--ttft", "0.5", "--tpot", "0.05", *options)
    assert result.exit_code == 0, result.output
    assert load.spec.states_objectives is tells
    assert load.spec.slo is not None
    assert (load.spec.slo.ttft_s, load.spec.slo.tpot_s) == (0.5, 0.05)


def test_bench_run_takes_a_workload_file_and_options_that_hold_for_every_workload(
    run: Run, load: FakeLoad, folder: Path
) -> None:
    (folder / "chats.yaml").write_text(
        "duration_s: 30\nstreams:\n- {name: chat, arrivals: {rate: 2}, first_tokens: 10, output_tokens: 5}\n"
    )
    arguments = ("--load", "4", "-d", "10", "--seed", "3", "--ttft", "0.5", "-l", "pool=1P1D", "-l", "name=night")
    result = run("bench", "run", "-w", "chats.yaml", "--out", "here", "--no-report", *arguments)
    assert result.exit_code == 0, result.output
    spec = load.spec
    assert (spec.name, spec.labels, spec.workload.duration_s, spec.workload.seed) == (
        "night",
        {"pool": "1P1D"},
        10.0,
        3,
    )
    assert spec.specification["load"] == 4
    starts = [session.start_s for session in spec.workload.streams[0].sessions]
    assert 25 <= len(starts) <= 55
    assert spec.slo is not None
    assert (spec.slo.ttft_s, spec.slo.tpot_s) == (0.5, 0.2)


def test_bench_run_replays_a_trace(run: Run, load: FakeLoad, folder: Path) -> None:
    lines = [
        f'{{"timestamp": {1000 * i}, "input_length": 64, "output_length": 8, "hash_ids": [{i}]}}' for i in range(9)
    ]
    (folder / "day.jsonl").write_text("\n".join(lines) + "\n")
    result = run("bench", "run", "-t", "day.jsonl", "--speed", "2", "--limit", "5", "--out", "here", "--no-report")
    assert result.exit_code == 0, result.output
    starts = [session.start_s for session in load.spec.workload.streams[0].sessions]
    assert starts == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert load.spec.name == "day"


def write_sessions(folder: Path) -> None:
    requests = [
        {"t": 0, "in": 640, "out": 64, "think_s": 0, "api_s": 1, "new": []},
        {"t": 3, "in": 320, "out": 32, "api_s": 1, "agent": "a", "new": []},
        {"t": 3, "in": 960, "out": 32, "think_s": 0.1, "api_s": 1, "like": [0, 10], "new": []},
    ]
    text = "".join(json.dumps({"session": f"s{n}", "requests": requests}) + "\n" for n in range(3))
    (folder / "sessions.jsonl").write_text(text)


def test_bench_run_plays_recorded_sessions(run: Run, load: FakeLoad, folder: Path) -> None:
    write_sessions(folder)
    options = "-k 2 --ramp 4 --shrink 16 --speed 2 --limit 2 --turns 3 --max-pause 1 --share-tools --longest 1000"
    result = run("bench", "run", "-t", "sessions.jsonl", *options.split(), "--out", "here", "--no-report")
    assert result.exit_code == 0, result.output
    (stream,) = load.spec.workload.streams
    sessions = list(stream.sessions)
    assert (stream.concurrency, len(sessions), sessions[1].start_s) == (2, 2, 2.0)
    assert sessions[0].prompt_lengths() == [40, 20, 60]
    assert load.spec.name == "sessions"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--prompt-tokens 5", "--prompt-tokens and a trace of sessions exclude each other"),
        ("--turns uniform:1,2", "--turns: 'uniform:1,2'; of a trace of sessions say how many"),
        ("--longest 10", "no sessions that are short enough"),
    ],
)
def test_bench_run_with_a_bad_option_for_sessions_says_what_to_do(
    run: Run, load: FakeLoad, folder: Path, arguments: str, complaint: str
) -> None:
    write_sessions(folder)
    result = run("bench", "run", "-t", "sessions.jsonl", *arguments.split(), "--out", "here")
    assert result.exit_code == 1
    assert complaint in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--ramp 3", "--ramp is for a trace of sessions"),
        ("--rate 2 -k 4", "--rate is for an open loop, --concurrency for a closed one"),
        ("-w a.yaml --rate 2", "--rate and --workload exclude each other; --load R scales"),
        ("-t a.jsonl --turns 2", "--turns and --trace exclude each other"),
        ("-w a.yaml -t a.jsonl", "cannot take both --workload and --trace"),
        ("--speed 2", "--speed is for a trace: give --trace FILE"),
        ("--think 2", "--turn-tokens and --think are for sessions of several turns"),
        ("--prefix-share 0.5", "--prefix-share and --prefix-count need --prefix-tokens"),
        ("--prompt-tokens many", "--prompt-tokens: "),
        ("--arrivals constant --burstiness 2", "--burstiness: "),
        ("--label pool", "--label: 'pool' is not KEY=VALUE"),
        ("-w none.yaml", "none.yaml: cannot be read"),
        ("-k 4 --load 2", "cannot be scaled to 2 requests/s"),
    ],
)
def test_bench_run_with_a_bad_option_says_what_to_do(
    run: Run, load: FakeLoad, folder: Path, arguments: str, complaint: str
) -> None:
    result = run("bench", "run", "--out", "here", *arguments.split())
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert not load.specs
    assert not (folder / "here").exists()


def test_bench_run_without_a_server_leaves_nothing_behind(run: Run, load: FakeLoad, folder: Path) -> None:
    load.error = Unreachable("nobody answers at 127.0.0.1:1")
    result = run("bench", "run", "--out", "here")
    assert result.exit_code == 1
    assert "nobody answers at 127.0.0.1:1\nStart a cluster with `kvrelay up`" in result.stderr
    assert not (folder / "here").exists()


def test_bench_run_whose_generator_breaks_keeps_what_was_measured(run: Run, load: FakeLoad, folder: Path) -> None:
    async def breaks(spec: LoadSpec, *observers: Observer, stop: asyncio.Event) -> LoadRun:
        measured = made_run()
        for request in measured.requests:
            for observer in observers:
                observer.record(request)
        raise LoadTestFailed("generator process 0 was killed by signal 9", measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("measure.load.run.run_load", breaks)
        result = run("bench", "run", "--out", "here")
    assert result.exit_code == 1
    assert "generator process 0 was killed by signal 9" in result.stderr
    assert len(read_run(folder / "here").requests) == 40


def test_bench_run_that_is_interrupted_prints_what_was_measured(run: Run, load: FakeLoad, folder: Path) -> None:
    load.interrupts_itself = True
    result = run("bench", "run", "--out", "here", "--no-report")
    assert result.exit_code == 130
    assert "ending the run: what still runs is cancelled, what was measured is kept" in result.stderr
    assert "SLOs are met" in result.stdout
    assert len(read_run(folder / "here").requests) == 40


@pytest.mark.parametrize(("num_refused", "exit_code"), [(0, 0), (4, 3)])
def test_bench_run_with_check_tells_ci_whether_enough_requests_were_good(
    run: Run, load: FakeLoad, num_refused: int, exit_code: int
) -> None:
    load.num_refused = num_refused
    result = run("bench", "run", "--out", "here", "--no-report", "--check", "0.95")
    assert result.exit_code == exit_code
    assert ("of the requests are good, 95.00% are required" in result.stderr) == bool(exit_code)


def test_bench_run_as_json_prints_the_summary_for_programs(run: Run, load: FakeLoad, folder: Path) -> None:
    load.num_refused = 8
    printed = run("bench", "run", "--out", "here", "--no-report", "--warm-up", "0", "--json").stdout
    summary = json.loads(printed)
    assert summary["kinds"][0]["good_share"]["value"] == 0.8
    assert summary["kinds"][0]["latencies"]["ttft"]["percentiles"][0]["estimate"]["value"] == pytest.approx(0.2)
    assert json.loads((folder / "here" / "summary.json").read_text()) == summary


@contextmanager
def fake_cluster() -> Iterator[str]:
    """A whole system with fake engines on a loop of its own; gives the router's address."""
    is_up, is_over = Event(), Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with running_system() as system:
            addresses.append(system.address)
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(60)
        yield addresses[0]
    finally:
        is_over.set()
        thread.join(60)


def test_bench_run_against_a_whole_system_measures_it(run: Run, folder: Path) -> None:
    options = "--requests 12 --rate 40 --prompt-tokens uniform:4,20 --output-tokens 4 --warm-up 0 --json"
    with fake_cluster() as address:
        result = run("bench", "run", "--target", address, "--out", "here", *options.split())
    assert result.exit_code == 0, result.output
    (overall, own) = json.loads(result.stdout)["kinds"]
    assert (overall["kind"], own["kind"]) == ("all", "load")
    assert (overall["num_requests"], overall["num_complete"], overall["mean_output_tokens"]) == (12, 12, 4.0)
    assert overall["latencies"]["queue"]["num_values"] == 12
    assert (folder / "here" / "report.html").read_text().startswith("<!doctype html>")


def test_bench_run_of_sessions_tells_how_they_went_beside_an_idle_run(run: Run, folder: Path) -> None:
    write_sessions(folder)
    options = (
        "-t",
        "sessions.jsonl",
        "--shrink",
        "16",
        "--speed",
        "30",
        "--warm-up",
        "0",
        "--no-report",
        "--ramp",
        "0",
    )
    with fake_cluster() as address:
        alone = run("bench", "run", "--target", address, *options, "-k", "1", "--out", "idle")
        assert alone.exit_code == 0, alone.output
        busy = run("bench", "run", "--target", address, *options, "-k", "3", "--out", "busy", "--idle", "idle")
    assert busy.exit_code == 0, busy.output
    assert "Sessions complete" in alone.stdout
    assert "Stretch" not in alone.stdout
    assert "Stretch" in busy.stdout
    sessions = json.loads((folder / "busy" / "summary.json").read_text())["sessions"]
    assert (sessions["num_sessions"], sessions["num_complete"]) == (3, 3)
    assert sessions["interactivity_p90"] > 0
    requests = read_run(folder / "busy").requests
    assert len(requests) == 9
    later = [request for request in requests if request.turn == 2]
    assert all(request.num_prompt_tokens == 60 and request.server.num_cached_tokens for request in later)
