"""Stages the documents for the site: `python deploy/site/source.py FOLDER [MERMAID]`. Needs only the standard library.

The folder gets every page of the repository, in the repository's own layout, and every file that a page links to, so
that one relative link holds in both. MERMAID is the script that draws the diagrams.
"""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_REPO = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def pages(repo: Path = _REPO) -> list[Path]:
    """Return the pages of the site, relative to the repository."""
    found = [*repo.glob("*.md"), *repo.glob("docs/*.md"), *repo.glob("benchmarks/**/*.md")]
    return sorted(path.relative_to(repo) for path in found)


def linked_files(repo: Path, page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to, relative to it; one may be missing."""
    text = _CODE.sub("", (repo / page).read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", path):
            yield Path(*_normal(page.parent / path))


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if not parts:
                return ["..", *path.parts]  # outside the repository
            parts.pop()
        else:
            parts.append(part)
    return parts


def missing_links(repo: Path = _REPO) -> dict[str, list[str]]:
    """Return the links of each page that lead to no file."""
    found = {
        str(page): sorted(str(path) for path in set(linked_files(repo, page)) if not (repo / path).is_file())
        for page in pages(repo)
    }
    return {page: links for page, links in found.items() if links}


def stage(folder: Path, assets: Mapping[str, Path], repo: Path = _REPO) -> int:
    """Replace `folder` by the site's source; returns the number of pages. Raises FileNotFoundError for a dead link."""
    if missing := missing_links(repo):
        raise FileNotFoundError("; ".join(f"{page} links to {', '.join(links)}" for page, links in missing.items()))
    shutil.rmtree(folder, ignore_errors=True)
    files = {path for page in pages(repo) for path in (page, *linked_files(repo, page))}
    for path in sorted(files):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repo / path, folder / path)
    for name, path in assets.items():
        (folder / "assets").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / "assets" / name)
    return len(pages(repo))


if __name__ == "__main__":
    assets = {"site.css": _HERE / "site.css"}
    if len(sys.argv) > 2:
        assets["mermaid.min.js"] = Path(sys.argv[2])
    try:
        print(f"{stage(Path(sys.argv[1]), assets)} pages")  # noqa: T201
    except FileNotFoundError as error:
        sys.exit(f"cannot stage the site: {error}; correct the links")
