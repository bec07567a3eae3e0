"""A cluster that cannot do what its configuration says does not start at all."""

import asyncio
import sys
from pathlib import Path

import pytest

from cluster import wiring
from cluster.processes.starter import Event, StartFailure
from common.config import TracingConfig
from tests.cluster.support import make_config


async def test_cluster_that_could_not_trace_as_told_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    told: list[Event] = []

    class Audience:
        def tell(self, event: Event) -> None:
            told.append(event)

    config = make_config(launcher="local").model_copy(update={"tracing": TracingConfig(endpoint="http://127.0.0.1:1")})
    status = await wiring.supervise(
        config, config_path=tmp_path / "serving.yaml", run_dir=tmp_path, audience=Audience(), stopping=asyncio.Event()
    )

    assert status == 1
    (failure,) = told
    assert isinstance(failure, StartFailure)
    assert failure.reason.startswith("tracing.endpoint: cannot trace: opentelemetry")
    assert not (tmp_path / "tls").exists()
