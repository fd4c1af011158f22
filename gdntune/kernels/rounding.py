"""Rounding at random: up or down with the chance that what is lost says, so that in the mean nothing is.

Philox-4x32 with seven rounds (Salmon et al., SC 2011), whose four words are 16 bits each for eight elements. Bits below those that are
kept are drawn and added, and cut off: a carry rounds up. Infinities and NaNs are rounded to nearest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32, Uint64, const_expr

ROUNDS = 7
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
# fp32's bits that bf16 and fp16 lack
DROPPED = {True: 16, False: 13}
EXPONENT = 0x7F800000
# elements that one call of the generator serves
EACH = 8


@cute.jit
def philox(c0, c1, c2, k0, k1):
    """Four words of a counter (c0, c1, c2, 0) under a key."""
    a, b, c, d = Uint32(c0), Uint32(c1), Uint32(c2), Uint32(0)
    x, y = Uint32(k0), Uint32(k1)
    for _ in cutlass.range_constexpr(ROUNDS):
        p, q = Uint64(M0) * Uint64(a), Uint64(M1) * Uint64(c)
        a, b, c, d = Uint32(q >> 32) ^ b ^ x, Uint32(q), Uint32(p >> 32) ^ d ^ y, Uint32(p)
        x, y = x + Uint32(W0), y + Uint32(W1)
    return a, b, c, d


@cute.jit
def at_random(values, out, counter, c1, c2, k0, k1):
    """Eight fp32 registers, or a multiple, to `out` of bf16 or fp16; counter: of the first eight, the next ones have the next."""
    n = const_expr(cute.size(values.shape))
    drop = const_expr(DROPPED[out.element_type is BFloat16])
    bits = cute.recast_tensor(values, Int32)
    for first in cutlass.range_constexpr(0, n, EACH):
        words = philox(counter + first // EACH, c1, c2, k0, k1)
        for e in cutlass.range_constexpr(EACH):
            x = bits[first + e]
            drawn = Int32((words[e // 2] >> (16 * (e % 2))) & Uint32((1 << drop) - 1))
            up = (x + drawn) & Int32(-(1 << drop))
            bits[first + e] = cutlass.select_((x & EXPONENT) == EXPONENT, x, up)
    for i in cutlass.range_constexpr(n):
        out[i] = values[i].to(out.element_type)
