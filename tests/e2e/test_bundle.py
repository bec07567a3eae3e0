"""A machine without Ray and without a registry: what the named packages bring, plus deploy/bundle, runs the service.

The environment here is made of links to installed packages, so that nothing is downloaded: those that the issue names
and whatever they require, and those that `deploy/bundle` lists. Everything else cannot be imported.
"""

import re
import subprocess
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.caches import empty_cache

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
NAMED = ("torch", "triton", "transformers")
_SERVING = """
name: bundle-test
launcher: local
model: {id: "random:tiny", device: cpu}
pools: {prefill: {num_blocks: 64}, decode: {num_blocks: 64}}
router: {port: 0}
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bundled() -> list[str]:
    listed = subprocess.run([REPOSITORY / "deploy" / "bundle", "--list"], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def with_requirements(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions, and all that they require in this environment, without extras."""
    found: dict[str, Distribution] = {}
    pending = [normalized(name) for name in names]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # a marker excludes it here, or it comes with CUDA
        required = [line for line in found[name].requires or () if "extra ==" not in line]
        pending += [normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in required]
    return found


def link(distributions: Iterable[Distribution], folder: Path) -> None:
    """Make every importable file of the distributions appear in `folder`: whole packages, where these are of one."""
    for each in distributions:
        files = [file for file in each.files or () if ".." not in file.parts]
        packages = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
        for file in files:
            shown = Path(file.parts[0]) if file.parts[0] in packages else Path(str(file))
            target = folder / shown
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(each.locate_file(shown))))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the named packages only."""
    folder = tmp_path_factory.mktemp("named")
    venv.create(folder, symlinks=True)
    brought = {name: each for name, each in with_requirements(NAMED).items() if name not in bundled()}
    (site_packages,) = folder.glob("lib/python*/site-packages")
    link(brought.values(), site_packages)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages that deploy/bundle would put into its folder for this Python."""
    folder = tmp_path_factory.mktemp("bundle")
    link([distribution(name) for name in bundled()], folder)
    return folder


@pytest.fixture
def environ(bundle: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    yield {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{bundle}:{REPOSITORY}",
        "KVRELAY_RUN_DIR": str(tmp_path / "run"),
        "HOME": str(tmp_path),
        "KVRELAY_CACHE": str(empty_cache(tmp_path)),
    }


def test_environment_lacks_what_is_not_named(python: Path, environ: dict[str, str]) -> None:
    script = "import importlib.util as i, sys; print([name for name in sys.argv[1:] if i.find_spec(name)])"
    command = [str(python), "-c", script, "torch", "ray", "uvloop", "pytest"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['torch']"


def test_cluster_of_named_packages_and_bundle_alone_generates(
    python: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "serving.yaml").write_text(_SERVING)

    def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "kvrelay", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    started = kvrelay("up")
    try:
        assert started.returncode == 0, started.stderr
        answer = kvrelay("generate", "-p", "hello", "--max-new-tokens", "8")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip()
    finally:
        stopped = kvrelay("down")
    assert stopped.returncode == 0, stopped.stderr
