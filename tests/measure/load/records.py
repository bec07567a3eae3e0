"""Records with defaults."""

from typing import Any

from measure.load.records import GeneratorReport, Outcome, RequestRecord, RunInfo


def record(**fields: Any) -> RequestRecord:
    """A request of four tokens: due and sent at 1, first token at 1.1, 10 ms between tokens."""
    values: dict[str, Any] = {
        "index": 0,
        "session": 0,
        "turn": 0,
        "kind": "chat",
        "due_s": 1.0,
        "sent_s": 1.0,
        "chunk_s": (1.1, 1.11, 1.12, 1.13),
        "chunk_tokens": (1, 1, 1, 1),
        "end_s": 1.13,
        "outcome": Outcome.COMPLETED,
        "num_prompt_tokens": 10,
        "num_wanted_tokens": 4,
    }
    return RequestRecord(**values | fields)


def info(**fields: Any) -> RunInfo:
    generator = GeneratorReport(
        num_processes=1,
        lag_p50_s=0.0001,
        lag_p99_s=0.001,
        lag_max_s=0.002,
        loop_lag_p99_s=0.0005,
        cpu_share=0.1,
        num_late=0,
        warnings=(),
    )
    values: dict[str, Any] = {
        "name": "run",
        "target": "somewhere",
        "system": "kvrelay",
        "model": "m",
        "workload": {"name": "w", "seed": 1},
        "started_at": "2030-01-01T00:00:00+00:00",
        "duration_s": 12.5,
        "num_workers": {"prefill": 1},
        "generator": generator,
    }
    return RunInfo(**values | fields)
