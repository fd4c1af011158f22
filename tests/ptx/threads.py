"""The threads that take an instruction."""

from functools import cached_property

import numpy as np

from .races import WARP
from .values import Array


class Threads:
    """Some of a grid's threads, as a mask over all of them, block after block."""

    def __init__(self, mask: Array):
        self.mask = mask
        self.everyone = bool(mask.all())

    @cached_property
    def lanes(self) -> Array:
        """Their numbers, [n]."""
        return np.flatnonzero(self.mask)

    @cached_property
    def warps(self) -> Array:
        """The numbers of the warps that are here whole, [n]."""
        return np.flatnonzero(self.mask.reshape(-1, WARP).all(1))

    @cached_property
    def torn(self) -> Array:
        """A mask of the threads whose warp is not here whole."""
        rows = self.mask.reshape(-1, WARP)
        return (rows & ~rows.all(1, keepdims=True)).reshape(-1)

    def any(self) -> bool:
        """Whether there are any."""
        return self.everyone or bool(self.mask.any())

    @classmethod
    def of_lanes(cls, lanes: Array, size: int) -> "Threads":
        """Threads by their numbers, of `size` in all."""
        mask = np.zeros(size, np.bool_)
        mask[lanes] = True
        return cls(mask)

    def of(self, x: Array) -> Array:
        """The elements of x, [threads] or [1], of these threads."""
        if self.everyone:
            return np.broadcast_to(x, self.mask.shape)
        return np.repeat(x, len(self.lanes)) if len(x) == 1 else x[self.lanes]

    def over_all(self, values: Array) -> Array:
        """Values of these threads, as an array over all."""
        if self.everyone:
            return np.ascontiguousarray(values)
        out = np.zeros(self.mask.shape, values.dtype)
        out[self.mask] = values
        return out

    def where(self, predicate: Array, negated: bool) -> "Threads":
        """Those of them for whom a predicate holds, or does not."""
        return Threads(self.mask & (~predicate if negated else predicate))
