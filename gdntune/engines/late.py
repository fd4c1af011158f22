"""Acting on a module once it is imported, without importing it.

A plug-in runs in every process of an engine, also in those that never build a model: importing the
model's modules there costs seconds and can end in a circle.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]

_waiting: dict[str, list[Action]] = {}
# Reentrant: an action may import what another one waits for.
_lock = threading.RLock()


def when_imported(name: str, action: Action) -> None:
    """Calls `action` with the module of that name: now where it is imported, else after it is."""
    with _lock:
        module = sys.modules.get(name)
        # A module that is still being executed lacks what the action looks for.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            action(module)
            return
        _waiting.setdefault(name, []).append(action)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)


def forget(action: Action) -> None:
    """Takes an action back, wherever it waits."""
    with _lock:
        for name in list(_waiting):
            _waiting[name] = [a for a in _waiting[name] if a != action]
            if not _waiting[name]:
                del _waiting[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and runs what waits for a module after it is executed."""

    def __init__(self) -> None:
        self._looking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Asking the other finders comes by here again, for the same name.
        if fullname not in _waiting or getattr(self._looking, "name", None) == fullname:
            return None
        self._looking.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.name = None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            # on the instance: the loader keeps every other method, such as get_source
            spec.loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _execute, fullname, execute
            )
        return spec


def _execute(name: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    with _lock:
        actions = _waiting.pop(name, [])
    for action in actions:
        action(module)


_FINDER = _Finder()
