"""How the fake engine's processes write a conversation. No libraries."""

from collections.abc import Sequence


class LineTemplate:
    """One `role: content` line per message, and the beginning of the one that the answer continues."""

    def render(self, messages: Sequence[tuple[str, str]], *, rendered_unix_s: int) -> str:
        """Return the lines; nothing in them depends on the time."""
        return "".join([*(f"{role}: {content}\n" for role, content in messages), "assistant:"])
