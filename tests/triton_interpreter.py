"""Triton's interpreter at the pace that tests need: its language is patched once a launch, not at every call inside it.

The interpreter puts its own functions in the place of ``triton.language`` for each launch, and again for each device
function that the kernel calls, where all is in place already. That was half of the time of every kernel test. It knows
private names of the interpreter; where a version of Triton has others, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_once_a_launch() -> None:
    """From here on a device function patches only what its launch has not. To be called once a process."""
    from triton import language
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "GridExecutor")):
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    launch: Callable[..., None] = interpreter.GridExecutor.__call__
    nothing = interpreter._LangPatchScope()
    patched: set[str] = set()
    seen_from: dict[int, frozenset[str]] = {}

    def patch_what_is_left(fn: Any) -> Any:
        names = seen_from.get(id(fn.__globals__))
        if names is None:
            seen = list(fn.__globals__.values())
            modules = {"language": language, "core": language.core}
            names = frozenset(name for name, module in modules.items() if any(value is module for value in seen))
            seen_from[id(fn.__globals__)] = names
        if names and names <= patched:
            return nothing
        patched.update(names)
        return patch(fn)

    def launch_with_nothing_patched(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(executor, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_what_is_left
    interpreter.GridExecutor.__call__ = launch_with_nothing_patched
