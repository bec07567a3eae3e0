"""Compiling the kernels, and doing without."""

import concurrent.futures
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.ops.cpu.build import NotBuilt, build_kernels
from engine.ops.cpu.library import CpuKernels


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with a line for each compilation by $CXX, which only pretends to compile."""
    calls, script = tmp_path / "calls", tmp_path / "compiler"
    calls.touch()
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && exit 0
echo x >> {calls}
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return calls


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "no C++ compiler"),
        ("", "$CXX is empty"),
        ("/nowhere/c++ -O1", "$CXX names /nowhere/c++, which is not installed"),
        ("c++ 'open", "$CXX cannot be read"),
        ("false", "false failed"),
    ],
)
def test_build_when_the_compiler_cannot_be_called_gives_the_reason(
    compiler: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", compiler)
    built = build_kernels(tmp_path)
    assert isinstance(built, NotBuilt)
    assert reason in built.reason
    assert "b'" not in built.reason


def test_build_when_the_compiler_fails_gives_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'printf "In file included from kernels.cpp:2:\\nsimd.h:85: error: unknown flag\\n" >&2; exit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    built = build_kernels(tmp_path / "cache")
    assert isinstance(built, NotBuilt)
    assert "unknown flag" in built.reason
    assert not list((tmp_path / "cache").glob("*.so"))


def test_build_when_it_is_there_needs_no_writable_folder(counting_compiler: Path, tmp_path: Path) -> None:
    first = build_kernels(tmp_path / "cache")
    (tmp_path / "cache" / "lock").unlink()
    (tmp_path / "cache" / "lock").mkdir()  # not even root can open it for writing
    assert build_kernels(tmp_path / "cache") == first
    assert counting_compiler.read_text() == "x\n"


def test_build_when_the_folder_is_not_writable_gives_the_reason(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert isinstance(build_kernels(in_the_way / "cache"), NotBuilt)


def test_build_when_called_by_many_at_once_compiles_once(counting_compiler: Path, tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        built = list(threads.map(build_kernels, [tmp_path / "cache"] * 8))
    assert len(set(map(str, built))) == 1
    assert counting_compiler.read_text() == "x\n"
    assert os.listdir(tmp_path / "cache") != []


@pytest.mark.parametrize("damage", [lambda content: content[:2], lambda content: b"", lambda content: b"x" + content])
def test_library_that_a_crash_has_cut_or_changed_is_compiled_again(
    damage: Callable[[bytes], bytes], counting_compiler: Path, tmp_path: Path
) -> None:
    library = build_kernels(tmp_path / "cache")
    assert isinstance(library, Path)
    whole = library.read_bytes()
    library.write_bytes(damage(whole))
    assert build_kernels(tmp_path / "cache") == library
    assert library.read_bytes() == whole
    assert counting_compiler.read_text() == "x\n" * 2


def test_library_that_others_may_write_is_compiled_again(counting_compiler: Path, tmp_path: Path) -> None:
    library = build_kernels(tmp_path / "cache")
    assert isinstance(library, Path)
    library.chmod(0o777)
    assert build_kernels(tmp_path / "cache") == library
    assert stat.S_IMODE(library.stat().st_mode) == 0o755
    assert counting_compiler.read_text() == "x\n" * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_library_that_another_user_planted_is_compiled_again(counting_compiler: Path, tmp_path: Path) -> None:
    library = build_kernels(tmp_path / "cache")
    assert isinstance(library, Path)
    os.chown(library, 65534, 65534)
    assert build_kernels(tmp_path / "cache") == library
    assert library.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_build_in_the_folder_of_another_user_gives_the_reason(counting_compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 65534, 65534)
    built = build_kernels(tmp_path / "cache")
    assert isinstance(built, NotBuilt)
    assert "another user may write there" in built.reason


def test_kernels_when_the_dtype_is_unknown_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float16"):
        CpuKernels(tmp_path, torch.float16)
