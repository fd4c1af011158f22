"""What is known of calls that were looked at whole, so that calls like them need no second look."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from gdntune.problem import Contract
from gdntune.runtime.dispatch import warn_once
from gdntune.runtime.guard import Guard, Pattern, guard

# Sets of sizes and settings that are kept; then all are dropped, and each is looked at once more.
MOST_KEYS = 4096
# Kinds of tensors that share a key: dtypes, strides, grad modes.
MOST_RECORDS = 16
LOCK = threading.RLock()


class Found(NamedTuple):
    """What a call came to.

    function, numbers: what runs, and its last arguments; adapt: what makes its tensors of those
    that were given, None where they are taken as they are.
    """

    function: Callable[..., Any]
    numbers: tuple[float | int, ...]
    adapt: Callable[[Any], Any] | None
    contract: Contract


class Record(NamedTuple):
    """As `Found`, and what calls it is of: their settings, whether one index is read and written,
    and a guard of their tensors.
    """

    settings: Any
    same: bool
    fits: Guard
    adapt: Callable[[Any], Any] | None
    function: Callable[..., Any]
    numbers: tuple[float | int, ...]
    contract: Any


def _never(*_: Any) -> bool:
    return False


_NOTHING = Record(None, False, _never, None, _never, (), None)
_ALL: list["Records"] = []


class Records:
    """The records of one function. recent: that of the call before; most calls are like it."""

    __slots__ = ("_by_key", "recent")

    def __init__(self) -> None:
        self.recent = _NOTHING
        self._by_key: dict[Any, tuple[Record, ...]] = {}
        _ALL.append(self)

    def find(self, key: Any, given: tuple[Any, ...]) -> Record | None:
        """The record of a call; None where it is to be looked at whole."""
        try:
            records = self._by_key.get(key, ())
        except TypeError:  # a setting that is no value, or a size that is a symbol
            return None
        for record in records:
            try:
                if record.fits(given):
                    self.recent = record
                    return record
            except RuntimeError:  # a nested tensor
                return None
        return None

    def keep(
        self,
        key: Any,
        given: tuple[Any, ...],
        patterns: dict[int, Pattern],
        settings: tuple[Any, ...],
        same: bool,
        found: Found,
    ) -> None:
        """Keeps what a call came to, for calls whose tensors fit the patterns."""
        fits = guard(given, patterns)
        if fits is None:
            # The same tensor in two places is a call that the guards cannot hold; it is no fault of
            # this torch.
            distinct = {id(given[i]) for i, p in patterns.items() if p is not None}
            if len(distinct) == sum(p is not None for p in patterns.values()):
                warn_once(
                    "this torch has no guards that gdntune knows: each call is looked at whole, and"
                    " takes some 100 us longer; gdntune.plan does without"
                )
            return
        record = Record(
            settings, same, fits, found.adapt, found.function, found.numbers, found.contract
        )
        with LOCK:
            # All at once: which are old is not known, and to count that would cost every call.
            if len(self._by_key) >= MOST_KEYS:
                self._by_key.clear()
            self.recent = record
            self._by_key[key] = (record, *self._by_key.get(key, ())[: MOST_RECORDS - 1])


def forget() -> None:
    """Drops all records, so that each call is looked at anew."""
    with LOCK:
        for records in _ALL:
            records.recent = _NOTHING
            records._by_key.clear()
