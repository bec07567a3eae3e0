"""guidellm and aiperf: how they are started, and where in their reports the figures are."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.foreign_load.report import Asked, Load, ToolFailed, ToolReport
from benchmarks.peers.group import ArmSpec, end_group, log_tail, start_group

_TIMEOUT_S = 300.0
_GRACE_S = 5.0
_REVISION = "0" * 40
_HUB_NAME = "local/served-model"


def guidellm(venv: Path, asked: Asked, load: Load, folder: Path) -> ToolReport:
    """Run `guidellm run`. Raises ToolFailed."""
    path = folder / "report.json"
    options: dict[str, Mapping[str, Any]] = {
        "backend": {"kind": "openai_http", "target": asked.root_url, "model": asked.model},
        "profile": {"kind": "concurrent", "streams": [load.concurrency]},
        "constraint": {"kind": "max_requests", "count": load.num_requests},
        "data": {
            "kind": "synthetic_text",
            "prompt_tokens": load.num_prompt_tokens,
            "output_tokens": load.num_output_tokens,
        },
        "tokenizer": {"kind": "huggingface_auto", "model": str(asked.tokenizer_dir)},
        "seed": {"kind": "static", "value": load.seed},
        "output": {"kind": "json", "path": str(path)},
    }
    command = [str(venv / "bin" / "guidellm"), "run", "--disable-console-interactive"]
    for name, value in options.items():
        command += [f"--{name}", json.dumps(value)]
    command += ["--output", "kind=console"]
    _run("guidellm", command, folder)
    return read_guidellm(_read_json(path))


def read_guidellm(report: Mapping[str, Any]) -> ToolReport:
    """Return the figures of a report with one benchmark. Raises ToolFailed."""
    try:
        (benchmark,) = report["benchmarks"]
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]
        ttft, tpot = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
        return ToolReport(
            num_complete=totals["successful"],
            num_failed=totals["errored"] + totals["incomplete"],
            num_prompt_tokens=round(metrics["prompt_token_count"]["successful"]["total_sum"]),
            num_output_tokens=round(metrics["output_token_count"]["successful"]["total_sum"]),
            ttft_p50_s=ttft["median"] / 1000,
            ttft_mean_s=ttft["mean"] / 1000,
            tpot_p50_s=tpot["median"] / 1000,
            tpot_mean_s=tpot["mean"] / 1000,
            e2e_p50_s=metrics["request_latency"]["successful"]["median"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ToolFailed(f"guidellm's report is not as expected: {error!r}") from error


def aiperf(venv: Path, asked: Asked, load: Load, folder: Path) -> ToolReport:
    """Run `aiperf profile`. Raises ToolFailed."""
    _hub_cache(folder / "hub", asked.tokenizer_dir)
    command = [str(venv / "bin" / "aiperf"), "profile", "--model", asked.model, "--url", asked.root_url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", _HUB_NAME, "--use-server-token-count"]
    command += ["--concurrency", str(load.concurrency), "--request-count", str(load.num_requests)]
    command += ["--synthetic-input-tokens-mean", str(load.num_prompt_tokens), "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(load.num_output_tokens), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--random-seed", str(load.seed), "--ui", "none"]
    command += ["--output-artifact-dir", str(folder), "--workers-max", "1", "--record-processors", "1"]
    _run("aiperf", command, folder, {"HF_HUB_CACHE": str(folder / "hub")})
    return read_aiperf(_read_json(folder / "profile_export_aiperf.json"))


def read_aiperf(report: Mapping[str, Any]) -> ToolReport:
    """Return the figures of a report. Raises ToolFailed."""
    try:
        num_complete = round(report["request_count"]["avg"])
        return ToolReport(
            num_complete=num_complete,
            num_failed=round(report["completed_request_count"]["avg"]) - num_complete,
            num_prompt_tokens=round(report["total_usage_prompt_tokens"]["avg"]),
            num_output_tokens=round(report["total_usage_completion_tokens"]["avg"]),
            ttft_p50_s=report["time_to_first_token"]["p50"] / 1000,
            ttft_mean_s=report["time_to_first_token"]["avg"] / 1000,
            tpot_p50_s=report["inter_token_latency"]["p50"] / 1000,
            tpot_mean_s=report["inter_token_latency"]["avg"] / 1000,
            e2e_p50_s=report["request_latency"]["p50"] / 1000,
        )
    except (KeyError, TypeError) as error:
        raise ToolFailed(f"aiperf's report is not as expected: {error!r}") from error


def _hub_cache(cache: Path, model_dir: Path) -> None:
    """Show a folder as a downloaded model: offline, aiperf takes names in the hub's cache and no folders."""
    repository = cache / f"models--{_HUB_NAME.replace('/', '--')}"
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(_REVISION)
    (repository / "snapshots" / _REVISION).symlink_to(model_dir, target_is_directory=True)


def _run(name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1")
    settings = {"HF_HOME": str(folder / "huggingface"), "OMP_NUM_THREADS": "1", **(env or {})}
    log_path = folder / "log.txt"
    process = start_group(ArmSpec(name=name, command=command, env=offline | settings), log_path=log_path)
    try:
        code = process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{name} does not end; its log is {log_path}") from None
    finally:
        end_group(process, grace_s=_GRACE_S)
    if code != 0:
        raise ToolFailed(f"{name} ended with {code}; its log is {log_path}, which ends with\n{log_tail(log_path)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToolFailed(f"{path} cannot be read: {error}") from error
    return found
