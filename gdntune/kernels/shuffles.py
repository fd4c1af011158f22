"""Exchanges and sums of numbers within a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def bfly(x, distance):
    """The x of the lane whose number differs by the bit `distance`."""
    return cute.arch.shuffle_sync_bfly(x, offset=distance, mask=-1, mask_and_clamp=31)


def at_lane(x, lane):
    """A lane's x, in all lanes."""
    return cute.arch.shuffle_sync(x, offset=lane, mask=-1, mask_and_clamp=31)


def sums(values, lanes: int = 32) -> list:
    """Each value's sum over groups of `lanes` neighbours, a power of two, in all of them; step by step, so
    that shuffles overlap.
    """
    found = list(values)
    for s in range(lanes.bit_length() - 1):
        found = [x + bfly(x, lanes >> (s + 1)) for x in found]
    return found


def sums_shared_out(x, n: int, lane, lanes: int = 32) -> None:
    """The sums of n values, a power of two, over groups of `lanes`, shared out: in the front of x a lane ends
    with max(1, n / lanes) of them, from value lane n / lanes on.

    At each step a lane gives away half of what it has: n shuffles, where all sums in every lane take
    n log2(lanes).
    """
    for s in range(lanes.bit_length() - 1):
        distance = lanes >> (s + 1)
        half = n >> (s + 1)
        if half:
            upper = (lane & distance) != 0
            for i in range(half):
                low, high = x[i], x[half + i]
                given = cutlass.select_(upper, low, high)
                x[i] = cutlass.select_(upper, high, low) + bfly(given, distance)
        else:
            x[0] = x[0] + bfly(x[0], distance)


def products(x, n: int, lane, upto: bool = True, after: bool = True) -> tuple:
    """Of lane t of the first n, a power of two: the product of the x of lanes 0 to t; that of lanes t+1 to
    n-1, 1 where there are none; and, of lane 0, that of all n. upto, after: which of the first two are
    wanted; the shuffles of both overlap.
    """
    before, behind = x, x
    for s in range(n.bit_length() - 1):
        d = 1 << s
        if upto:
            y = at_lane(before, cutlass.max(lane - d, 0))
        if after:
            z = at_lane(behind, cutlass.min(lane + d, 31))
        if upto:
            before = cutlass.select_(lane >= d, before * y, before)
        if after:
            behind = cutlass.select_(lane + d < n, behind * z, behind)
    later = None
    if after:
        later = at_lane(behind, cutlass.min(lane + 1, 31))
        later = cutlass.select_(lane + 1 >= n, Float32(1.0), later)
    return before, later, behind
