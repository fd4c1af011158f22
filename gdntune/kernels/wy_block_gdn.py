"""What a block of `wy_block` computes once of q, k and the gates, where a head has one decay (GDN).

k and q enter the products as they came; norms and decays are multiplied in where a row of V is solved. F[t, i] is the product of the
decays of tokens i+1..t, never a quotient, so that nothing overflows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from gdntune.kernels import fragments as fr
from gdntune.kernels import shuffles
from gdntune.kernels.wy_operands import SPAN_DECAYS, Operands, Shape, clear_last_row

F32, BF = Float32, BFloat16
CHUNK = 8  # keys of a 16-byte load


class RowStage:
    """A thread has 16 bytes of a token."""

    def __init__(self, decode, shape: Shape):
        self.d, self.s = decode, shape
        self.chunks = shape.K // CHUNK
        self.half = shape.tokens * self.chunks
        self.pieces = -(-2 * self.half // shape.threads)
        # whether all threads of a piece have k, or all q
        self.apart = self.half % shape.threads == 0

    def place(self, m: int, tid):
        """Of a thread's piece m: k or q (0 or 1), token, chunk."""
        at = m * self.s.threads + tid
        which = const_expr(m * self.s.threads // self.half) if self.apart else at // self.half
        at = at - which * self.half
        return which, at // self.chunks, at % self.chunks

    @cute.jit
    def load(self, k, q, span, hq, tid):
        """Issues the loads of k and q."""
        x = cute.make_rmem_tensor((self.pieces * CHUNK,), k.element_type)
        x.fill(0)
        for m in cutlass.range_constexpr(self.pieces):
            which, t, chunk = self.place(m, tid)
            to = cute.local_tile(x, (CHUNK,), (m,))
            if const_expr(self.apart):
                source = q if const_expr(which == 1) else k
                if span.has(t):
                    cute.autovec_copy(
                        span.piece(source, t, hq, CHUNK, chunk),
                        to,
                    )
            else:
                if span.has(t):
                    if which == 0:
                        cute.autovec_copy(
                            span.piece(k, t, hq, CHUNK, chunk),
                            to,
                        )
                    elif which == 1:
                        cute.autovec_copy(
                            span.piece(q, t, hq, CHUNK, chunk),
                            to,
                        )
        return x

    @cute.jit
    def fill(self, x, o: Operands, tid):
        """k and q to shared memory, and their sums of squares."""
        for m in cutlass.range_constexpr(self.pieces):
            which, t, chunk = self.place(m, tid)
            rx = cute.make_tensor(x.iterator + m * CHUNK, cute.make_layout((CHUNK,)))
            total = F32(0.0)
            values = fr.wide(rx, CHUNK)
            for i in cutlass.range_constexpr(CHUNK):
                total += values[i] * values[i]
            (total,) = shuffles.sums((total,), self.chunks)
            if const_expr(2 * self.half % self.s.threads == 0):
                self.store(rx, values, which, t, chunk, o)
            else:
                if which < 2:
                    self.store(rx, values, which, t, chunk, o)
            if chunk == 0 and which < 2:
                o.squares[which, t] = total
        clear_last_row(self.s, o, tid)

    def store(self, rx, values, which, t, chunk, o: Operands):
        s = self.s
        base = s.word(4 * chunk)
        for term in range(s.terms):
            row = o.x[s.row(term, which, t), None]
            for i in range(4):
                step = 4 * i if s.vec == 8 else i % 2 * 4 + i // 2
                if s.in_order:
                    step = i
                if s.terms == 1:
                    word = fr.pair(rx, 2 * i)
                else:
                    word = fr.split(fr.pair(values, 2 * i))
                cute.autovec_copy(word, cute.local_tile(row, (2,), (base + step,)))

    @cute.jit
    def combine(
        self, o: Operands, th, decay: Float32, beta: Float32, scale: Float32, use_qk_l2norm: Int32
    ):
        """The last warp: what the solution of a row needs. Lane t has token t's decay and beta."""
        if th.warp == self.s.warps - 1:
            N = const_expr(self.s.N)
            upto, after, _ = shuffles.products(decay, N, th.lane)
            t = cutlass.min(th.lane, self.s.tokens - 1)
            iq, ik = self.d.norms(o.squares[1, t], o.squares[0, t], scale, use_qk_l2norm)
            if th.lane < N:
                values = cute.make_rmem_tensor((4,), F32)
                values[0] = beta * ik
                values[1] = beta * ik * ik
                values[2] = iq
                values[3] = upto
                cute.autovec_copy(values, o.factors[th.lane, None])
                o.decay[SPAN_DECAYS + th.lane] = after
            if th.lane == N - 1:
                o.decay[0] = upto
            self.gram(o, th, decay)

    def gram(self, o: Operands, th, decay):
        """k_i.k_t and k_i.q_t by mma, times F[t, i]."""
        s = self.s
        for n in range(s.tiles):
            for j in range(n + 1):
                acc = fr.registers(8, F32, 0.0)
                for x in range(s.products):
                    for term in range(s.terms):
                        a = fr.registers(8, BF)
                        self.fragment(o, th, term, n, x, a)
                        for other in range(s.terms):
                            b = self.keys(o, th, term, other, n, j, x, a)
                            fr.mma(fr.accumulator(acc, x % 2 * 4), fr.operand_a(a), b)
                        if s.packed:
                            break  # rows g + 8 are the other term
                self.write(o, th, decay, n, j, acc)

    def fragment(self, o: Operands, th, term: int, n: int, x: int, a):
        s = self.s
        fr.read_matrices(
            o.x, self.s.place_a(th, term // 2 if s.packed else term * s.tiles + n) + 16 * x, a
        )

    def keys(self, o: Operands, th, term: int, other: int, n: int, j: int, x: int, a):
        """The keys' half of a fragment as B."""
        s = self.s
        source = a
        if not s.packed and (other != term or j != n):
            source = fr.registers(8, BF)
            self.fragment(o, th, other, j, x, source)
        k = fr.registers(4, BF)
        shift = 2 * other if s.packed else 0
        for f in range(2):
            cute.autovec_copy(fr.pair(source, 4 * f + shift), fr.pair(k, 2 * f))
        return fr.operand_b(k)

    @cute.jit
    def write(
        self, o: Operands, th, decay: Float32, n: cutlass.Constexpr, j: cutlass.Constexpr, acc
    ):
        s = self.s
        for e in cutlass.range_constexpr(2):
            t = 8 * n + th.g
            i = 8 * j + 2 * th.c + e
            f = F32(1.0)
            if const_expr(s.packed):
                t = th.g % 4
            for token in cutlass.range_constexpr(8 * j + 1, min(8 * n + 8, s.N)):
                d = shuffles.at_lane(decay, token)
                f = f * cutlass.select_(token > i and token <= t, d, F32(1.0))
            if const_expr(s.packed):
                y = acc[e] + acc[4 + e]
                if const_expr(s.terms > 1):
                    y = y + (acc[2 + e] + acc[6 + e])
                if i < 4:
                    o.gram[th.g // 4, t, i] = y * f
            else:
                o.gram[0, t, i] = (acc[e] + acc[4 + e]) * f
                o.gram[1, t, i] = (acc[2 + e] + acc[6 + e]) * f
