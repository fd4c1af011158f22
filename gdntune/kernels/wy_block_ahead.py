"""What `wy_block` asks into the L2 cache for a block that starts later.

A block computes for most of its life and has no loads under way then; more blocks at once do not fit. So each asks for what the block
some places behind it in the grid will read, by bulk prefetches, which hold no register and wait for nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from gdntune.kernels import l2

# bytes that one prefetch by a lane is sure to bring
SECTOR = 32


class Ahead:
    """`blocks`: how many places behind in the grid, a power of two; what is asked for is of the same head and rows of V."""

    def __init__(self, decode, blocks: int):
        self.d, self.blocks = decode, blocks

    @cute.jit
    def request(self, n):
        """The request whose block lies so far behind; the own one where there is none."""
        x, y, z = cute.arch.grid_dim()
        # by a shift: one to two times `blocks` behind where a request's blocks are no power of two
        shift = 31 - Int32(cute.arch.clz(x * y))
        later = n + cutlass.max(Int32(self.blocks) >> shift, 1)
        if later >= z:
            later = n
        return later

    @cute.jit
    def ask_tokens(self, later, q, k, v, a, n, length, hq, leads, hv, v0, th):
        """Each token's k, q, v and a key's gates, a warp each. leads: whether the head is the first that has hq."""
        d = self.d
        if later > n:
            self.rows(0, k[later, None, hq, None], 0, d.K, length, leads, th)
            self.rows(1, q[later, None, hq, None], 0, d.K, length, leads, th)
            self.rows(2, v[later, None, hv, None], v0, d.tile_v, length, True, th)
            if const_expr(d.per_k):
                self.rows(3, a[later, None, hv, None], 0, d.K, length, True, th)

    @cute.jit
    def rows(self, warp: cutlass.Constexpr, x, first, width: cutlass.Constexpr, length, wanted, th):
        """One warp asks for `width` elements from `first` on of each token's row."""
        each = const_expr(SECTOR * 8 // x.element_type.width)
        sectors = const_expr(width // each)
        if th.warp == warp and wanted:
            for i in cutlass.range_constexpr(0, self.d.tokens * sectors, 32):
                at = i + th.lane
                t = at // sectors
                if t < length:
                    place = cute.domain_offset((t, first + at % sectors * each), x)
                    cute.arch.prefetch(place.iterator.to_llvm_ptr(), cache_level="L2")

    @cute.jit
    def ask_state(self, later, slot, state, n, hv, v0, slots, null_index, th):
        """The rows of the later request's state, by one thread."""
        d = self.d
        live, _ = d.named(slot, slot, slots, null_index)
        if th.tid == 0 and live and later > n:
            rows = cute.domain_offset((v0, 0), state[Int64(slot), hv, None, None])
            # multiples of 16 bytes, in a tile of whole rows
            size = const_expr(d.tile_v * d.K * state.element_type.width // 8)
            l2.prefetch_run(rows.iterator.toint(), Int32(size))
