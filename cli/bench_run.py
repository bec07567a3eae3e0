"""`kvrelay bench run`: puts a server under load and tells what its users would have seen."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cli.bench_load_options import (
    RESULTS,
    ArrivalsOption,
    BurstinessOption,
    ConcurrencyOption,
    ContentOption,
    DirectOption,
    DrainOption,
    DurationOption,
    LabelOption,
    LimitOption,
    LoadOption,
    ModelOption,
    OutOption,
    OutputTokensOption,
    PrefixCountOption,
    PrefixShareOption,
    PrefixTokensOption,
    ProcessesOption,
    PromptTokensOption,
    RateOption,
    RequestsOption,
    SeedOption,
    ShrinkOption,
    SpeedOption,
    TargetOption,
    ThinkOption,
    TimeoutOption,
    TraceOption,
    TurnsOption,
    TurnTokensOption,
    WorkloadOption,
)
from cli.bench_measure import Judgement, Output, measure, show
from cli.bench_options import (
    CheckOption,
    CoolDownOption,
    ItlOption,
    JsonOption,
    ReportOption,
    TtftOption,
    TtftTokensOption,
    WarmUpOption,
    objectives,
    served_objectives,
)
from cli.bench_workload import Limits, Replay, Shape, workload_spec
from cli.console import err
from cli.errors import EXIT_INTERRUPTED, CliError
from cli.options import DEFAULT_CONFIG, ApiKeyOption, CaOption, ConfigOption
from cli.target import find_cluster

if TYPE_CHECKING:
    from measure.load.targets.interface import TargetSpec


def run(
    target: TargetOption = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    direct: DirectOption = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
    workload: WorkloadOption = None,
    rate: RateOption = None,
    arrivals: ArrivalsOption = None,
    burstiness: BurstinessOption = None,
    concurrency: ConcurrencyOption = None,
    load: LoadOption = None,
    duration: DurationOption = None,
    requests: RequestsOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    turns: TurnsOption = None,
    turn_tokens: TurnTokensOption = None,
    think: ThinkOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefix_share: PrefixShareOption = None,
    prefix_count: PrefixCountOption = None,
    content: ContentOption = None,
    seed: SeedOption = None,
    trace: TraceOption = None,
    speed: SpeedOption = None,
    shrink: ShrinkOption = None,
    limit: LimitOption = None,
    ttft: TtftOption = None,
    ttft_tokens: TtftTokensOption = None,
    itl: ItlOption = None,
    check: CheckOption = None,
    warm_up: WarmUpOption = None,
    cool_down: CoolDownOption = None,
    drain: DrainOption = 120.0,
    timeout: TimeoutOption = 600.0,
    processes: ProcessesOption = None,
    out: OutOption = None,
    label: LabelOption = None,
    as_json: JsonOption = False,
    report: ReportOption = True,
) -> None:
    """Put a server under load and measure what its users see.

    \b
    kvrelay bench run                                      one request a second, for a minute
    kvrelay bench run --rate 4 --duration 120 --ttft 0.5 --itl 0.05
    kvrelay bench run -k 16 --turns 6 --prefix-tokens 300  sixteen chats at any time
    kvrelay bench run --trace conversation.jsonl --shrink 16 --load 2
    kvrelay bench run -T http://127.0.0.1:8000/v1 -w chats.yaml --check 0.99

    Requests are sent when they are due, whether or not others have been answered,
    and latencies count from then. Every request is kept in DIR, with a summary and
    a page of plots. Ctrl-C ends the run and keeps what was measured.

    A good request is answered to its end, with its first token and the mean gap
    between its tokens within the objectives; refused and failed ones are not good.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.spec import LoadSpec
    from measure.workload.build import build_workload

    labels = _labels(label or [])
    specification = workload_spec(
        workload,
        Shape(
            rate=rate,
            arrivals=arrivals,
            burstiness=burstiness,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turns=turns,
            turn_tokens=turn_tokens,
            think=think,
            prefix_share=prefix_share,
            prefix_tokens=prefix_tokens,
            prefix_count=prefix_count,
        ),
        Replay(trace=trace, speed=speed, shrink=shrink, limit=limit),
        Limits(duration=duration, requests=requests, content=content, seed=seed),
    )
    slo = objectives(served_objectives(config_path), ttft_s=ttft, ttft_tokens=ttft_tokens, tpot_s=itl)
    name = labels.pop("name", specification.name)
    spec = LoadSpec(
        name=name,
        target=_target(target, ca, config_path, api_key=api_key, model=model, direct=direct),
        workload=build_workload(specification, load=load),
        specification=specification.model_dump(mode="json", exclude_none=True)
        | ({} if load is None else {"load": load}),
        slo=slo if ttft is not None or itl is not None else None,
        timeout_s=timeout,
        drain_s=drain,
        processes=processes,
        labels=labels,
    )
    folder = out or _new_folder(name)
    measured, was_interrupted = measure(spec, folder)
    err.print(f"Every request is in {folder}; `kvrelay bench report {folder}` judges it anew", soft_wrap=True)
    judgement = Judgement(slo=slo, warm_up_s=warm_up, cool_down_s=cool_down, required_share=check)
    show(measured, judgement, folder, Output(as_json=as_json, with_report=report))
    if was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _target(url: str | None, ca: Path | None, config_path: Path, **options: Any) -> "TargetSpec":
    """Return the server that is named, else the running cluster."""
    from measure.load.targets.interface import TargetSpec

    if url is not None:
        return TargetSpec(url=url, tls=None if ca is None else str(ca), **options)
    cluster = find_cluster(None, ca, config_path)
    return TargetSpec(url=cluster.address, tls=cluster.tls, **options)


def _labels(texts: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise CliError(f"--label: {text!r}; say KEY=VALUE")
        labels[key] = value
    return labels


def _new_folder(name: str) -> Path:
    """Return a folder that does not exist."""
    stem = "".join(character if character.isalnum() or character in "-_." else "-" for character in name)
    folder = RESULTS / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while folder.exists():
        folder = RESULTS / f"{folder.name.partition('~')[0]}~{number}"
        number += 1
    return folder
