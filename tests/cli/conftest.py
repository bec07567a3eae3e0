import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cluster
from cli.main import app
from tests.client.fake_server import FakeInference, serving

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs a command line; the terminal is wide, so that tables are not cut."""
    runner = CliRunner(env={"COLUMNS": "200", "KVRELAY_ADDRESS": "", "KVRELAY_CONFIG": "", "TERM": "dumb"})

    def invoke(*arguments: str, **keywords: Any) -> Result:
        return runner.invoke(app, list(arguments), prog_name="kvrelay", **keywords)

    return invoke


@pytest.fixture
def fake() -> FakeInference:
    return FakeInference()


@pytest.fixture
def address(fake: FakeInference) -> Iterator[str]:
    with serving(fake) as bound:
        yield bound


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty, without a serving.yaml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Up:
    config: Any
    config_path: Path
    run_dir: Path


class FakeLifecycle(ModuleType):
    """cluster.lifecycle without processes: remembers what was asked for."""

    class ClusterError(Exception):
        __module__ = "cluster.lifecycle"

    def __init__(self, root: Path) -> None:
        super().__init__("cluster.lifecycle")
        self._root = root
        self.address = "127.0.0.1:1"
        self.running: set[Path] = set()
        self.ups: list[Up] = []
        self.downs: list[Path] = []
        self.up_error: BaseException | None = None
        self.trouble = ""

    def default_run_dir(self, name: str) -> Path:
        return self._root / name

    def up(self, config: Any, *, config_path: Path, run_dir: Path, report: Callable[[str], None]) -> Any:
        self.ups.append(Up(config=config, config_path=config_path, run_dir=run_dir))
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        report("prefill-0: loading")
        self.running.add(run_dir)
        if self.up_error is not None:
            raise self.up_error
        return self._info(run_dir)

    def down(self, run_dir: Path, *, report: Callable[[str], None]) -> bool:
        self.downs.append(run_dir)
        was_running = run_dir in self.running
        self.running.discard(run_dir)
        if was_running:
            report("stopped")
        return was_running

    def wait_for_end(self, info: Any) -> None:
        assert info.run_dir in self.running

    def read_info(self, run_dir: Path) -> Any:
        return self._info(run_dir) if run_dir in self.running else None

    def running_names(self) -> list[str]:
        return sorted(run_dir.name for run_dir in self.running)

    def _info(self, run_dir: Path) -> Any:
        pid = 2**22 + 1  # above the largest one
        return SimpleNamespace(
            address=self.address,
            http_addresses=("127.0.0.1:2",),
            pid=pid,
            run_dir=run_dir,
            tls=False,
            trouble=self.trouble,
        )


@pytest.fixture(autouse=True)
def lifecycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLifecycle:
    fake = FakeLifecycle(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "cluster.lifecycle", fake)
    monkeypatch.setattr(cluster, "lifecycle", fake, raising=False)
    return fake
