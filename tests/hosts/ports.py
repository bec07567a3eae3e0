"""The ports that docs/hosts.md tells to open."""

import re
from pathlib import Path

_DOC = Path(__file__).parents[2] / "docs" / "hosts.md"
_ROW = re.compile(r"^\| `(\d+)(?:-(\d+))?` \|.*\| (.*) \|$", re.MULTILINE)


def documented_ports() -> dict[str, range]:
    """Return the documented ports by what sets them, as the table names it; empty for ssh."""
    table = _DOC.read_text(encoding="utf-8").partition("\n## Ports\n")[2].partition("\n## ")[0]
    return {setting.strip(): range(int(first), int(last or first) + 1) for first, last, setting in _ROW.findall(table)}
