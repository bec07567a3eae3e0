"""Messages for a command that fails: the reason, and what to do about it."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from cli.console import err

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
# Exceptions of these packages are written for the user; any other one is a defect and keeps its traceback.
_OUR_PACKAGES = frozenset({"cli", "kvrelay", "common", "engine", "cluster", "router", "measure"})


class CliError(Exception):
    """A command cannot do what it was asked to; the message says what to do."""


class ErrorReportingGroup(TyperGroup):
    """The command group that turns expected errors into a message and an exit code: 1 failure, 130 interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            err.print()
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            err.print(f"kvrelay: {message}", soft_wrap=True)
            raise typer.Exit(EXIT_FAILURE) from error


def explain(error: Exception) -> str | None:
    """Return the message for an expected error, None for an unexpected one."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if type(error).__module__.partition(".")[0] not in _OUR_PACKAGES:
        return None
    hint = _hint(error)
    return f"{error}\n{hint}" if hint else str(error)


def _hint(error: Exception) -> str:
    errors = sys.modules.get("common.errors")  # not loaded: then the error is none of its classes
    if errors is None:
        return ""
    if isinstance(error, errors.Unreachable):
        return "Start a cluster with `kvrelay up`, or name another one with --address HOST:PORT (bench: --target URL)."
    if isinstance(error, errors.Unauthenticated):
        return "Give a key with KVRELAY_API_KEY or --api-key."
    if isinstance(error, errors.Overloaded):
        when = f" in {error.retry_after_s:g} s" if error.retry_after_s is not None else " later"
        return f"Try again{when}."
    if isinstance(error, errors.DeadlineExceeded):
        return "Give it more time with --timeout, or look at `kvrelay status`."
    if isinstance(error, errors.WorkerError):
        return "Look at `kvrelay status` and `kvrelay logs`."
    return ""
