"""Replacing a function of an engine by one of ours, and putting it back."""

import atexit
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from gdntune.engines import late
from gdntune.errors import BuildError, CaptureError, ToolMissing, UnsupportedProblem

# What says that ours does not serve a call. Each is raised before anything is written, so that the
# engine's own function starts from the same states. Other errors are faults, and pass.
NOT_SERVED = (UnsupportedProblem, ToolMissing, BuildError, CaptureError)

Function = Callable[..., Any]
# Of a function so many refused calls are known again at once; sizes of batches are fewer.
_REMEMBERED = 4096
_log = logging.getLogger("gdntune.engines")
_said: set[str] = set()


def say_once(text: str) -> None:
    """A line of log, the first time that it is said in a process."""
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def not_here(engine: str, e: ModuleNotFoundError) -> ToolMissing:
    """What to raise where enable() acts on an engine's modules at once, and they are not there."""
    return ToolMissing(
        f"{e}: enable() is for a process that has {engine}; install it beside gdntune, in a version"
        " that docs/engine.md names"
    )


class Counts:
    """How many calls of a function ours served, and how many went on to the engine's own."""

    def __init__(self) -> None:
        self.served = self.passed_on = 0


# Of every function that was replaced in this process, also those that were put back since.
_counted: list[tuple[str, Counts]] = []


def served() -> dict[str, tuple[int, int]]:
    """How many calls of each replaced function of an engine gdntune served in this process, and how
    many went on to the engine's own, by the function's name.

    A call that is captured in a CUDA graph, or traced by torch.compile, counts once, however often
    it is replayed.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, counts in _counted:
        ours, theirs = found.get(name, (0, 0))
        found[name] = ours + counts.served, theirs + counts.passed_on
    return found


def _say_served() -> None:
    for name, (ours, theirs) in served().items():
        if ours or theirs:
            _log.info("%s: %d calls served by gdntune, %d by the engine's own", name, ours, theirs)


atexit.register(_say_served)


def before(name: str, ours: Function, theirs: Function) -> Function:
    """`theirs` with `ours` before it: the same signature, and what ours does not serve goes on to
    theirs with one line of log for each reason. Its attribute `counts` tells the two apart.
    """
    refused: set[Any] = set()
    counts = Counts()
    _counted.append((name, counts))

    @functools.wraps(theirs)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        # a refusal takes some 100 us to word: calls like a refused one go on at once
        if not refused or _kind(args, kwargs) not in refused:
            try:
                result = ours(*args, **kwargs)
                counts.served += 1
                return result
            except NOT_SERVED as e:
                say_once(f"{name} is served by the engine's own kernel: {e}")
                if isinstance(e, UnsupportedProblem) and len(refused) < _REMEMBERED:
                    refused.add(_kind(args, kwargs))
        counts.passed_on += 1
        return theirs(*args, **kwargs)

    substitute.counts = counts  # type: ignore[attr-defined]
    return substitute


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call's being served depends on, but for addresses. Sizes are whole, since packed rows
    are served or not by how many there are to how many requests.
    """
    return tuple(
        (x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x
        for x in (*args, *kwargs.values())
        if isinstance(x, torch.Tensor | bool | int | str | None)
    )


class Target(NamedTuple):
    """A function to replace: the attribute of a module, and what makes ours from theirs.

    parameters: names that theirs must have, by which a version that we do not know is recognised.
    """

    module: str
    attribute: str
    make: Callable[[Function], Function]
    parameters: tuple[str, ...]


class Patches:
    """The functions of one engine that are replaced. on() and off() may be called at any time and
    any number of times; a module that is not imported yet is patched when it is.
    """

    def __init__(self, engine: str, targets: Iterable[Target]) -> None:
        self.engine = engine
        self._targets: dict[str, list[Target]] = {}
        for target in targets:
            self._targets.setdefault(target.module, []).append(target)
        self._lock = threading.RLock()
        self._on = False
        self._done: dict[tuple[str, str], tuple[ModuleType, Function, Function]] = {}

    def on(self) -> None:
        """Replaces the functions."""
        with self._lock:
            if self._on:
                return
            self._on = True
            for module in self._targets:
                late.when_imported(module, self._patch)

    def off(self) -> None:
        """Puts the engine's functions back, but where something else has replaced ours since."""
        with self._lock:
            self._on = False
            late.forget(self._patch)
            for (_, attribute), (module, theirs, ours) in self._done.items():
                if getattr(module, attribute, None) is ours:
                    setattr(module, attribute, theirs)
            self._done.clear()

    def replaced(self) -> dict[str, Function]:
        """Ours that stand in the engine's place now, by `module.attribute`."""
        return {f"{module}.{name}": ours for (module, name), (_, _, ours) in self._done.items()}

    def _patch(self, module: ModuleType) -> None:
        for target in self._targets[module.__name__]:
            name = f"{target.module}.{target.attribute}"
            theirs = getattr(module, target.attribute, None)
            if theirs is None:
                say_once(f"{name} is not there in this version of {self.engine}: not replaced")
                continue
            there = inspect.signature(theirs).parameters
            if missing := [p for p in target.parameters if p not in there]:
                say_once(
                    f"{name} has no parameter {', '.join(missing)} in this version of"
                    f" {self.engine}: not replaced"
                )
                continue
            ours = target.make(theirs)
            setattr(module, target.attribute, ours)
            self._done[target.module, target.attribute] = (module, theirs, ours)
            _log.info("%s: gdntune serves %s", self.engine, name)
