"""Triton's interpreter in half of its time."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

MANY_TOKENS = 9
"""Number from which on steps count as large: each token is a program or more, which the interpreter runs in turn."""


@contextmanager
def patched_once() -> Iterator[None]:
    """Let the interpreter put its own functions into triton.language once for each launch of a kernel.

    Triton 3.6 does it in every call of a function of the kernel, and finds all of them already there.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__  # noqa: SLF001
    done: set[str] = set()

    def patch_new(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        names = {module.__name__ for module in modules if module in (language, language.core)}
        if names and names <= done:
            return interpreter._LangPatchScope()  # noqa: SLF001
        done.update(names)
        return patch_lang(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.ops.triton_kernels.rope_kv_write._MANY_TOKENS", MANY_TOKENS)
        patch.setattr("engine.ops.triton_kernels.ops._WARM_UP_TOKENS", MANY_TOKENS)
        patch.setattr(interpreter, "_patch_lang", patch_new)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield
