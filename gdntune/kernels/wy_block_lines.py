"""States in k_last memory, as `wy_block` reads and writes them in whole lines of 128 bytes.

An operand wants eight rows of 64 bytes at a time: half a line of each. Here a load has four rows of 128 bytes, every other one of an
octet, and the next load the rows between them; then lanes of neighbouring rows exchange halves:

    lanes of an even row    of their own row the first half, of the next row the second
    lanes of an odd row     of the row before the second half, of their own the first

The second is what the other lane lacks. Before a store they exchange them back.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gdntune.kernels import fragments as fr
from gdntune.kernels import shuffles

# lanes of neighbouring rows are so far apart
NEXT_ROW = 4
# words of 16 bytes
WORDS = 4


class Lines:
    """What `wy_block` does otherwise with such states."""

    def __init__(self, decode):
        self.d = decode

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.d.share // self.d.shape.vec // 2

    def at(self, octet, line):
        """The place in registers of an octet's line, both halves of it."""
        return octet * self.d.share + 2 * line * self.d.shape.vec

    def runs(self, tile, row0, th, line, octet):
        """Both runs of memory of an octet's line."""
        vec = self.d.shape.vec
        for e in range(2):
            row = tile[row0 + 8 * octet + th.g // 2 * 2 + e, None]
            half = th.g % 2 if e == 0 else 1 - th.g % 2
            yield cute.local_tile(row, (vec,), (8 * line + 4 * half + th.c,))

    def load(self, tile, row0, th):
        """Issues the loads of a warp's rows."""
        d, vec = self.d, self.d.shape.vec
        x = cute.make_rmem_tensor((d.octets * d.share,), d.state_dtype)
        for octet in range(d.octets):
            for line in range(self.lines):
                for e, source in enumerate(self.runs(tile, row0, th, line, octet)):
                    at = self.at(octet, line) + e * vec
                    cute.autovec_copy(source, fr.view(x, at, (vec,), (1,)))
        return x

    def turned(self, x, th):
        """From what loads brought to both halves of a thread's own row."""
        d = self.d
        y = cute.make_rmem_tensor((d.octets * d.share,), d.state_dtype)
        source, goal = cute.recast_tensor(x, Int32), cute.recast_tensor(y, Int32)
        odd = th.g % 2 == 1
        for octet in range(d.octets):
            for line in range(self.lines):
                first = self.at(octet, line) // d.shape.vec * WORDS
                for i in range(first, first + WORDS):
                    low, high = source[i], source[i + WORDS]
                    goal[i] = cutlass.select_(odd, high, low)
                    goal[i + WORDS] = shuffles.bfly(cutlass.select_(odd, low, high), NEXT_ROW)
        return y

    @cute.jit
    def store(self, x, tile, row0, th, writes, first: cutlass.Constexpr, end: cutlass.Constexpr):
        """Writes the lines that end among columns of eight keys `first` to `end`.

        Line by line, behind a barrier, as they are computed: their fp32 sums are then not all held at once.
        """
        vec = const_expr(self.d.shape.vec)
        odd = th.g % 2 == 1
        source = cute.recast_tensor(x, Int32)
        for line in cutlass.range_constexpr(first // vec, end // vec):
            for octet in cutlass.range_constexpr(self.d.octets):
                at = const_expr(self.at(octet, line) // vec * WORDS)
                y = cute.make_rmem_tensor((2 * vec,), self.d.state_dtype)
                goal = cute.recast_tensor(y, Int32)
                for i in cutlass.range_constexpr(WORDS):
                    low = source[at + i]
                    high = shuffles.bfly(source[at + i + WORDS], NEXT_ROW)
                    goal[i] = cutlass.select_(odd, high, low)
                    goal[i + WORDS] = cutlass.select_(odd, low, high)
                if writes:
                    self.write(y, tile, row0, th, line, octet)
        cute.arch.sync_warp()

    def write(self, y, tile, row0, th, line, octet) -> None:
        vec = self.d.shape.vec
        for e, goal in enumerate(self.runs(tile, row0, th, line, octet)):
            cute.autovec_copy(fr.view(y, e * vec, (vec,), (1,)), goal)
