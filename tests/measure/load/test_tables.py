import io

from rich.console import Console, RenderableType

from common.slo import Slo
from measure.load.comparison import compare, comparison_view
from measure.load.measures import summarize
from measure.load.records import Outcome, PoolSample, Run, ServerReport
from measure.load.tables import summary_view
from tests.measure.load.made_runs import make_failure, make_request, make_run, make_worker

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def text(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, markup=False, highlight=False)
    console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def line(printed: str, start: str) -> list[str]:
    """The words of the first line that begins with those of `start`."""
    lines = (line.split() for line in printed.splitlines())
    return next(words for words in lines if words[: len(start.split())] == start.split())


def chats(num_requests: int = 40, *, ttft_s: float = 0.2, num_refused: int = 0) -> Run:
    report = ServerReport(
        queue_s=0.01, num_cached_tokens=25, transfer_bytes=2_000_000, prefill_worker="p0", decode_worker="d0"
    )
    requests = [
        make_request(i, due_s=float(i), ttft_s=ttft_s, gaps_s=[0.02] * 4, server=report) for i in range(num_requests)
    ]
    requests += [make_failure(900 + i, Outcome.REFUSED, due_s=float(i), error="Full") for i in range(num_refused)]
    workers = (make_worker("p0", "prefill", num_used_blocks=5), make_worker("d0", "decode", num_used_blocks=50))
    samples = [PoolSample(at_s=float(i), num_queued=3, workers=workers) for i in range(num_requests)]
    return make_run(requests, samples=samples, name="chats")


def shown(run: Run, required_share: float = 0.99) -> str:
    return text(summary_view(summarize(run, slo=SLO, warm_up_s=0), required_share=required_share))


def test_summary_view_begins_with_the_run_and_the_verdict() -> None:
    printed = shown(chats())
    assert printed.startswith(
        "chats · kvrelay 0, 1 prefill + 1 decode · fake · grpc://127.0.0.1:50051\n40 requests, due"
    )
    assert "SLOs are met: 100.0 % good [91.2 % – 100.0 %], 99 % wanted" in printed


def test_summary_view_distinguishes_certain_misses_of_the_objectives() -> None:
    assert "SLOs are not met: 66.7 % good" in shown(chats(num_refused=20))
    assert "SLOs are not met, by less than the uncertainty: 97.6 % good" in shown(chats(num_refused=1))
    assert "SLOs are met: 66.7 % good" in shown(chats(num_refused=20), required_share=0.6)


def test_summary_view_has_counts_latencies_pools_and_failures() -> None:
    printed = shown(chats(num_refused=20))
    assert line(printed, "all") == ["all", "60", "40", "(66.7", "%)", "–", "–", "20", "–", "–", "–", "25.0", "%"]
    assert line(printed, "all TPOT")[:4] == ["all", "TPOT", "20", "ms"]
    assert line(printed, "server")[:4] == ["server", "queue", "10", "ms"]
    assert line(printed, "decode")[:7] == ["decode", "decode", "1", "–", "0", "0", "50"]
    assert line(printed, "refused") == ["refused", "20", "Full"]
    assert "40 transfers of 2 MB" in printed
    assert line(printed, "Cache hit")[2:4] == ["25.0", "%"]
    assert "Delay of the generator" in printed


def test_summary_view_marks_percentiles_of_too_few_requests() -> None:
    printed = shown(chats())
    assert line(printed, "all TPOT")[2:10] == ["20", "ms", "~20", "ms", "~20", "ms", "~20", "ms"]
    assert "~ too few requests for this percentile (p90 takes 100, " in printed
    assert "p99 takes 1,000, p99 of ITL takes " in printed
    assert "~" not in shown(chats(num_requests=1000))


def test_summary_view_of_one_kind_has_one_row_of_counts() -> None:
    assert not any(words and words[0] == "chat" for words in map(str.split, shown(chats()).splitlines()))


def test_comparison_view_shows_values_and_ratios_with_a_legend() -> None:
    runs = [chats(), chats(ttft_s=0.3)]
    comparison = compare(runs, [summarize(run, slo=SLO, warm_up_s=0) for run in runs])
    printed = text(comparison_view(comparison, ["before", "after"]))
    assert line(printed, "TTFT p50") == [
        "TTFT",
        "p50",
        "all",
        "200",
        "ms",
        "300",
        "ms",
        "×1.5",
        "[1.5",
        "–",
        "1.5],",
        "worse",
    ]
    assert line(printed, "good") == ["good", "all", "100.0", "%", "100.0", "%", "+0.0", "[+0.0", "–", "+0.0]", "pt"]
    assert printed.startswith("A before · kvrelay 0 · grpc://127.0.0.1:50051 · 40 requests\nB after · ")
    assert "Compared request by request: B." in printed


def test_summary_view_of_a_failed_run_has_reasons_and_no_latencies() -> None:
    printed = shown(make_run([make_failure(i, Outcome.FAILED, due_s=float(i), error="Boom: gone") for i in range(3)]))
    assert "SLOs are not met: 0.0 % good" in printed
    assert line(printed, "failed") == ["failed", "3", "Boom:", "gone"]
    assert "p50" not in printed


def test_summary_view_of_a_single_request_marks_every_percentile() -> None:
    printed = shown(make_run([make_request(0, ttft_s=0.25, gaps_s=[0.01])]))
    assert line(printed, "all")[:3] == ["all", "1", "1"]
    assert printed.count("~250 ms") == 4
