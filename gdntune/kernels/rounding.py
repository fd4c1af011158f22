"""Rounding at random: up or down with the chance that what is lost says, so that in the mean nothing is.

Philox-4x32 with seven rounds (Salmon et al., SC 2011), whose four words are 16 bits each for eight elements. Bits below those that are
kept are drawn and added, and cut off: a carry rounds up. Infinities and NaNs are left to the conversion.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32, Uint64, const_expr

ROUNDS = 7
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
EXPONENT = 0x7F800000
# elements that one call of the generator serves
EACH = 8


@cute.jit
def philox(c0, c1, c2, seed):
    """Four words of a counter (c0, c1, c2, 0) under a key, two numbers in memory."""
    a, b, c, d = Uint32(c0), Uint32(c1), Uint32(c2), Uint32(0)
    x, y = Uint32(seed[0]), Uint32(seed[1])
    for _ in cutlass.range_constexpr(ROUNDS):
        p, q = Uint64(M0) * Uint64(a), Uint64(M1) * Uint64(c)
        a, b, c, d = Uint32(q >> 32) ^ b ^ x, Uint32(q), Uint32(p >> 32) ^ d ^ y, Uint32(p)
        x, y = x + Uint32(W0), y + Uint32(W1)
    return a, b, c, d


@cute.jit
def at_random(values, words, dtype):
    """fp32 registers, at most two a word, in place to numbers that bf16 or fp16 has."""
    # fp32's bits that the dtype lacks
    drop = const_expr(16 if dtype is BFloat16 else 13)
    bits = cute.recast_tensor(values, Int32)
    for e in cutlass.range_constexpr(cute.size(values.shape)):
        x = bits[e]
        drawn = Int32((words[e // 2] >> (16 * (e % 2))) & Uint32((1 << drop) - 1))
        up = (x + drawn) & Int32(-(1 << drop))
        bits[e] = cutlass.select_((x & EXPONENT) == EXPONENT, x, up)
