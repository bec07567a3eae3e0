"""The chat template of the fake engine. Imports no libraries."""

from collections.abc import Sequence


class LineTemplate:
    """Writes one `role: content` line per message, and the beginning of the assistant's line."""

    def render(self, messages: Sequence[tuple[str, str]], *, rendered_unix_s: int) -> str:
        """Return the lines; they do not depend on the time."""
        return "".join([*(f"{role}: {content}\n" for role, content in messages), "assistant:"])
