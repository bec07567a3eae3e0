"""Every block of commands in the documents runs as it stands, against one small cluster, unless it says `no-run`.

The cluster of fake engines has ports of its own, which replace those of the documents; `up` and `down` change nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.lifecycle import RUN_DIR_ENV, ClusterInfo
from tests.documents import PYTHON, REPO, SHELL, blocks_of, documents
from tests.e2e.harness import fake_config, standing_cluster

pytestmark = pytest.mark.e2e

_PRELUDE = """
kvrelay() { case $1 in up | down) ;; *) .venv/bin/kvrelay "$@" ;; esac; }
curl() { command curl --fail-with-body --silent --show-error "$@"; }
"""
_RUNNING = {document: [block for block in blocks_of(document) if block.runs] for document in documents()}


def documents_with(languages: tuple[str, ...]) -> list[str]:
    return [document for document, found in _RUNNING.items() if any(block.language in languages for block in found)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """A cluster whose folder is a checkout as the documents see it: documents, programs and a serving.yaml."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "docs").symlink_to(REPO / "docs")
    (folder / ".venv").symlink_to(sys.prefix)
    with standing_cluster(folder, fake_config(name="run", router={"port": 0, "http_port": 0})) as info:
        yield info


def run(program: str, code: str, info: ClusterInfo) -> None:
    """Run a script in the cluster's folder; fails unless it ends well."""
    folder = info.run_dir.parent
    ended = subprocess.run(
        [program, "-"] if program == sys.executable else [program, "-euo", "pipefail", "-s"],
        input=code.replace("127.0.0.1:50051", info.address).replace("127.0.0.1:8000", info.http_address),
        cwd=folder,
        env=os.environ | {RUN_DIR_ENV: str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.parametrize("document", documents_with(SHELL))
def test_commands_of_a_document_run_as_they_stand(document: str, cluster: ClusterInfo) -> None:
    commands = "\n".join(block.text for block in _RUNNING[document] if block.language in SHELL)
    if "curl " in commands and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    run("bash", _PRELUDE + commands.replace(".venv/bin/kvrelay", "kvrelay"), cluster)


@pytest.mark.parametrize("document", documents_with(PYTHON))
def test_python_of_a_document_runs_as_it_stands(document: str, cluster: ClusterInfo) -> None:
    run(sys.executable, "\n".join(block.text for block in _RUNNING[document] if block.language in PYTHON), cluster)
