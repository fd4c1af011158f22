"""fp32 states of `wy_block` as TF32 operands, where each key has a decay (KDA) and tokens are eight.

TF32 has 11 bits: x = hi + lo, where hi is x cut off to TF32 and the tensor core cuts off lo, leaves 2^-21 of x. Of a product of two
such sums hi hi, hi lo and lo hi are summed; what is left out, lo lo, is at most 2^-20 of the product. u alone is rounded, which costs little. A state is split by one `and` and
one subtraction an element, a third of what three bf16 terms take, and the registers that a thread loads are the operand: the columns c
and c + 4 of product x are keys 2x and 2x + 1 of a thread's share.

Operands lie in shared memory as fp32, which warps split once more each: 12 KB, where both parts took 24 that L1 has for the state on
its way (B=16 on an H200: 19.7 us in place of 20.8). They are 16 or 8 bytes a lane, so that a warp reads them as they are. Lanes are
exchanged by an xor where threads that write at once would meet in a bank.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warp

from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block_copied import each_read

F32 = Float32
# of a product along the contraction
DEPTH = 8
# of fp32's bits those that TF32 has
MASK = -8192
HALF = 4096


def mma(acc, a, b) -> None:
    """acc += a b: 16 rows, 8 columns, 8 products of TF32 a place."""
    atom = cute.make_mma_atom(warp.MmaTF32Op((16, 8, DEPTH)))
    a, b = cute.recast_tensor(a, TFloat32), cute.recast_tensor(b, TFloat32)
    cute.mma_atom_call(atom, acc, a, b, acc)


def split(x, n: int, rounded: bool = False):
    """n fp32 as what TF32 holds of them and the rest. Not rounded: cut off, an instruction less."""
    hi, lo = fr.registers(n), fr.registers(n)
    bits, kept = cute.recast_tensor(x, Int32), cute.recast_tensor(hi, Int32)
    for i in range(n):
        kept[i] = (bits[i] + HALF if rounded else bits[i]) & MASK
        lo[i] = x[i] - hi[i]
    return hi, lo


def projection(smem, K: int):
    """The projection's operand [K / 8, 32, 4] fp32."""
    return smem.allocate_tensor(F32, cute.make_layout((K // DEPTH, 32, 4), stride=(128, 4, 1)), 16)


def keys(smem, K: int):
    """The final state's operand [K / 8, 32, 2] fp32."""
    return smem.allocate_tensor(F32, cute.make_layout((K // DEPTH, 32, 2), stride=(64, 2, 1)), 16)


# fp32 of a row of u, of which 8 are used: so eight rows of eight bytes a lane lie in different banks
WIDTH_OF_U = 12


class Tf32:
    """What `wy_block` does otherwise with such states."""

    def __init__(self, decode):
        self.d = decode

    @property
    def steps(self) -> int:
        """Products along K."""
        return self.d.K // DEPTH

    def fill_projection(self, x, t, p, o) -> None:
        """A token's k and q of keys 2p and 2p + 1: x = k, q, k, q, which are the four registers of one lane's A."""
        step = p // 8 * 2 + p % 2
        lane = (4 * t + p // 2 % 4) ^ (4 * (step & 1))
        cute.autovec_copy(x, o.x[step, lane, None])

    def fill_final(self, x, t, p, o) -> None:
        """Decayed k of tokens t and t + 1, t even, of keys 2p and 2p + 1: a key's are B's registers of one lane, whose rows c and c + 4
        are tokens 2c and 2c + 1.
        """
        step = p // 8 * 2 + p % 2
        c = p // 2 % 4
        for e in range(2):
            y = fr.registers(2)
            for later in range(2):
                y[later] = x[2 * later + e]
            lane = (8 * c + 4 * e + t // 2) ^ self.exchange(c, step)
            cute.autovec_copy(y, o.keys[step, lane, None])

    def exchange(self, c, step):
        """What lanes of the final state's operand are exchanged by; c: half the column."""
        return c ^ (4 * (step & 3))

    def project(self, raw, o, th):
        """P of the warp's rows. The small products have a sum of their own: fewer in a row, and what a tensor core cuts off of a small
        sum is small.
        """
        d = self.d
        sums = fr.registers(2 * d.octets * 4, F32, 0.0)
        if d.copied_by:
            d.copied_by.wait()

        def read(x: int):
            if d.copied_by:
                d.copied_by.take(raw, 2 * x, 2 * x + 2, th)
            a = fr.registers(4)
            cute.autovec_copy(o.x[x, th.lane ^ (4 * (x & 1)), None], a)
            return a

        for x, a in each_read(range(self.steps), read, d.early_reads):
            operands = [fr.view(y, 0, ((2, 2),), ((1, 2),)) for y in split(a, 4)]
            for j in range(d.octets):
                hi, lo = split(fr.pair(raw, j * d.share + 2 * x), 2)
                for order, a, b in (
                    (0, operands[0], hi),
                    (1, operands[0], lo),
                    (1, operands[1], hi),
                ):
                    acc = fr.accumulator(sums, 4 * (order * d.octets + j))
                    mma(acc, a, fr.view(b, 0, ((2,),), ((1,),)))
        p = fr.registers(d.octets * 4)
        for i in range(d.octets * 4):
            p[i] = sums[i] + sums[4 * d.octets + i]
        return p

    def keep_u(self, u, sU, row) -> None:
        """u, which is split where it is read: by all lanes."""
        cute.autovec_copy(u, cute.local_tile(sU[row, None], (DEPTH,), (0,)))

    def read_u(self, sU, th):
        """u as A's registers, hi and lo, of each two octets."""
        found = []
        for m in range(self.d.octets // 2):
            x = fr.registers(4)
            for half in range(2):
                row = self.d.row_of(2 * m + half, th.g)
                tokens = fr.registers(2)
                cute.autovec_copy(cute.local_tile(sU[row, None], (2,), (th.c,)), tokens)
                x[half], x[2 + half] = tokens[0], tokens[1]
            found.append([fr.view(y, 0, ((2, 2),), ((1, 2),)) for y in split(x, 4, rounded=True)])
        return found

    def advance(self, raw, o, th, sm, tile, row0, writes) -> None:
        """The final state to memory, 16 bytes of each row as soon as they are computed, so that few sums are held at once."""
        d = self.d
        u = self.read_u(sm.u, th)

        def read(x: int):
            decays = d.decays_of(o, th, x, 2, None)
            if d.copied_by:
                d.copied_by.take(raw, 2 * x, 2 * x + 4, th)
            keys = [fr.registers(2) for _ in range(2)]
            for e in range(2):
                lane = th.lane ^ self.exchange(th.g // 2, x + e)
                cute.autovec_copy(o.keys[x + e, lane, None], keys[e])
            return decays, keys

        for x, (decays, keys) in each_read(range(0, self.steps, 2), read, d.early_reads):
            goals = list(d.runs(tile, row0, th))
            for e in range(2):
                parts = split(keys[e], 2)
                for m, terms in enumerate(u):
                    self.advance_two(raw, terms, parts, fr.pair(decays, 2 * e), x + e, m)
            if d.lines_by is None:
                d.store_runs(raw, goals, 2 * x, 2 * x + 4, writes)
            elif x % 4 == 2:
                d.lines_by.store(raw, tile, row0, th, writes, x - 2, x + 2)
            if x % 4 == 2:
                # four sums under way; later keys are not read before them
                cute.arch.sync_warp()

    def advance_two(self, raw, u, keys, decays, step: int, m: int) -> None:
        """Two octets of rows, eight keys."""
        d = self.d
        first, rest = u
        hi, lo = (fr.view(y, 0, ((2,),), ((1,),)) for y in keys)
        x = fr.registers(4)
        places = [(2 * m + half) * d.share + 2 * step for half in range(2)]
        for half in range(2):
            fr.pair(x, 2 * half).store(fr.pair(raw, places[half]).load() * decays.load())
        acc = fr.accumulator(x)
        # small products first: a sum is cut off at each
        mma(acc, rest, hi)
        mma(acc, first, lo)
        mma(acc, first, hi)
        for half in range(2):
            fr.pair(raw, places[half]).store(fr.pair(x, 2 * half).load())
