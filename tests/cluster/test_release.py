"""`.ci/release` builds in any checkout, and says when a commit is not to be published."""

import shutil
import subprocess
from pathlib import Path

import pytest

_REPO = Path(__file__).parents[2]
_TOOL = """#!/bin/sh
cat >/dev/null
case $* in *build*) touch dist/kvrelay-1.0-py3-none-any.whl dist/kvrelay-1.0.tar.gz ;; esac
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A committed checkout of version 1.0 whose build tools are installed: stubs."""
    (tmp_path / ".ci").mkdir()
    for name in ("release", "release.lock", "install-torch"):
        shutil.copy(_REPO / ".ci" / name, tmp_path / ".ci")
    (tmp_path / ".gitignore").write_text(".venv-release\ndist\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.0"\n')
    (tmp_path / "requirements.lock").write_text("a==1 --hash=b\n")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    tools = tmp_path / ".venv-release" / "bin"
    tools.mkdir(parents=True)
    shutil.copy(_REPO / ".ci" / "release.lock", tools.parent / "made-from")
    for name in ("python", "twine", "cyclonedx-py"):
        (tools / name).write_text(_TOOL)
        (tools / name).chmod(0o755)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("README.md", "new", "not to be published: there are uncommitted changes"),
        ("CHANGELOG.md", "## [Unreleased]\n", "not to be published: CHANGELOG.md has no section [1.0]"),
        ("CHANGELOG.md", "## [1.0]\n", "git tag -s v1.0"),
    ],
)
def test_wheel_is_built_in_any_checkout_and_published_from_few(checkout: Path, file: str, text: str, said: str) -> None:
    (checkout / file).write_text(text)
    if file == "CHANGELOG.md" and text != "## [Unreleased]\n":
        git(checkout, "commit", "-q", "-a", "-m", "release")
    ended = subprocess.run(
        [".ci/release"], cwd=checkout, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )

    assert "kvrelay-1.0-py3-none-any.whl" in (checkout / "dist" / "SHA256SUMS").read_text()
    assert said in ended.stdout.splitlines()[-1]
