"""Sums over a warp that are shared out among its lanes while they come, and numbers that lanes look up."""

import functools

import cutlass
from cutlass import Int32

from gdntune.kernels.shuffles import bfly

# of a butterfly over a warp
STEPS = 5


class SharedOut:
    """`shuffles.sums_shared_out` of values that come one after the other, which takes registers for a few of them
    alone: two that are there become one, of which half the lanes have the first.
    """

    def __init__(self, lane):
        self.lane, self.count = lane, 0
        # the value that waits for another at each step
        self.open: list = [None] * STEPS
        self.done: list = []

    def add(self, x) -> None:
        """A lane's part of the next sum."""
        self.count += 1
        for s in range(STEPS):
            if self.open[s] is None:
                self.open[s] = x
                return
            x, self.open[s] = self._joined(self.open[s], x, 16 >> s), None
        self.done.append(x)

    def _joined(self, low, high, distance: int):
        upper = (self.lane & distance) != 0
        given = cutlass.select_(upper, low, high)
        return cutlass.select_(upper, high, low) + bfly(given, distance)

    def totals(self) -> list:
        """A lane's sums, one of each 32 values. The number of values is a power of two, or a multiple of 32."""
        steps = self._steps()
        found = list(self.done)
        if steps < STEPS:
            x = self.open[steps]
            for s in range(steps, STEPS):
                x = x + bfly(x, 16 >> s)
            found.append(x)
        return found

    def number(self):
        """Which of its 32 values a lane's sum is of; neighbours share one where there are fewer."""
        bits = [(self.lane >> (STEPS - 1 - s) & 1) << s for s in range(self._steps())]
        return functools.reduce(lambda a, b: a + b, bits)

    def _steps(self) -> int:
        return min(self.count.bit_length() - 1, STEPS)

    def shares(self, labels: list) -> list:
        """What a lane has: a sum, the label (a small number) of the value that it is of, and whether this
        lane is the one to use it.
        """
        steps = self._steps()
        there = self.lane % (1 << (STEPS - steps)) == 0
        return [
            (x, self._label(labels[32 * m : 32 * (m + 1)], steps), there)
            for m, x in enumerate(self.totals())
        ]

    def _label(self, labels: list, steps: int):
        """Of a lane, whose first bit of five is the first bit of its value's number from the right."""
        bits = 8 if max(labels) < 256 else 16
        each = 32 // bits
        # in the lanes' order; those that share a value have its label
        ordered = [labels[_reversed(lane, steps)] for lane in range(32)]
        words = []
        for first in range(0, 32, each):
            word = sum(x << (bits * i) for i, x in enumerate(ordered[first : first + each]))
            words.append(Int32(word - (1 << 32) if word >> 31 else word))
        bit = each
        while len(words) > 1:
            upper = (self.lane & bit) != 0
            words = [
                cutlass.select_(upper, b, a) for a, b in zip(words[::2], words[1::2], strict=True)
            ]
            bit *= 2
        return words[0] >> (self.lane % each * bits) & ((1 << bits) - 1)


def _reversed(lane: int, steps: int) -> int:
    """The number of the value that a lane ends with."""
    return sum((lane >> (STEPS - 1 - s) & 1) << s for s in range(steps))
