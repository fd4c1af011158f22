"""The tokens of a call, as `ring` works them out: W and C W, which all rows of V share, then the rows' corrections and outputs."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from gdntune.kernels import decode, shuffles
from gdntune.kernels import fragments as fr
from gdntune.kernels.ring_rows import RingRows
from gdntune.kernels.ring_window import TERMS, Corrected
from gdntune.kernels.wy_block_rows import HIGHEST_ORDER

F32, BF = Float32, BFloat16
# of a token's own correction and of W and C W: with two, an output was off by 1.08 of the tolerance on an H200
OWN_TERMS = 3
# elements of a matrix of eight rows, an operand's unit
MATRIX = 64


class RingTokens(RingRows):
    """What a block does with the call's tokens."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        # two accumulators where a warp's sums alone do not fill mma's latency
        self.chains = 2 if self.row_tiles * self.token_columns < 4 else 1
        # of W and C W, and one that is read beside the last column's three
        self.matrices = self.token_columns * self.shape.tiles * OWN_TERMS + 1

    @cute.jit
    def prepare(self, o, matrices, th, decay, beta, scale: Float32, use_qk_l2norm: Int32):
        """By the last warp, with token t's decay and beta in lane t: factors, Gram matrices, then W - I and C W to `matrices`. The other
        warps wait for it, so that it has no branch: mma's latency hides the factors.
        """
        if th.warp == self.shape.warps - 1:
            N = const_expr(self.shape.N)
            upto, _, _ = shuffles.products(decay, N, th.lane, after=False)
            t = cutlass.min(th.lane, self.tokens - 1)
            norms = use_qk_l2norm != 0
            ik = cute.math.rsqrt(o.squares[0, t] + F32(decode.EPSILON), fastmath=True)
            iq = cute.math.rsqrt(o.squares[1, t] + F32(decode.EPSILON), fastmath=True) * scale
            ik = cutlass.select_(norms, ik, F32(1.0))
            values = cute.make_rmem_tensor((4,), F32)
            values[0] = beta * ik
            values[1] = beta * ik * ik
            values[2] = cutlass.select_(norms, iq, scale)
            values[3] = upto
            self.stage.gram(o, th, decay)
            if th.lane < N:
                cute.autovec_copy(values, o.factors[th.lane, None])
            cute.arch.sync_warp()
            self.solve_all(o, matrices, th)

    def solve_all(self, o, matrices, th):
        """W - I and C W: a lane has a column, what a correction of 1 at a token does to all others."""
        N = self.shape.N
        j = th.lane % max(N, 8)
        w, kept = [], []
        for t in range(self.tokens):
            line, factors = fr.registers(N), fr.registers(4)
            cute.autovec_copy(o.factors[t, None], factors)
            cute.autovec_copy(o.gram[0, t, None], line)
            x = F32(0.0)
            for i in range(t):
                x = x + line[i] * w[i]
            x = -x * factors[1]
            w.append(x + cutlass.select_(j == t, F32(1.0), F32(0.0)))
            line = fr.registers(N)
            cute.autovec_copy(o.gram[1, t, None], line)
            y = F32(0.0)
            for i in range(t + 1):
                y = y + line[i] * w[i]
            both = fr.registers(2)
            both[0], both[1] = x, y * factors[2]
            kept.append([fr.split(both) for _ in range(OWN_TERMS)])
            # a store ahead of a line's load would be waited for
            if t % 4 == 3 or t == self.tokens - 1:
                for n, words in enumerate(kept):
                    self.keep_solution(words, matrices, t - len(kept) + 1 + n, j)
                kept = []

    def keep_solution(self, words, matrices, t: int, j) -> None:
        """W - I and C W of token t and column j; lanes of one column store the same."""
        for term, word in enumerate(words):
            for which in range(2):
                column, row = (
                    (0, 4 * which + t) if self.shape.packed else (t // 8 * 2 + which, t % 8)
                )
                at = self.solution_matrix(column, j // 8, term) * MATRIX + 8 * row + j % 8
                matrices[at] = word[which]

    def solution_matrix(self, column, tile, term: int):
        """Where W or C W of a column of tokens and the corrections of a tile is."""
        return (column * self.shape.tiles + tile) * OWN_TERMS + term

    @cute.jit
    def load_tokens(self, v, span, hv, row0, th):
        """Issues the loads of v as sums lie: of tokens 2c and 2c + 1 of each eight, a thread's rows side by side."""
        x = cute.make_rmem_tensor((2 * self.shape.tiles * self.octets,), v.element_type)
        x.fill(0)
        for n in cutlass.range_constexpr(2 * self.shape.tiles):
            t = n // 2 * 8 + 2 * th.c + n % 2
            # packed: lanes behind have q's columns
            if t < self.shape.N:
                source = v[span.row, span.token(t), hv, None]
                cute.autovec_copy(
                    cute.local_tile(source, (self.octets,), (row0 // self.octets + th.g,)),
                    cute.local_tile(x, (self.octets,), (n,)),
                )
        return x

    def scales(self, o, th):
        """Of each column of tokens a thread's two: what v and what P' is multiplied by."""
        s, found = self.shape, []
        for tile in range(s.tiles):
            both = [[], []]
            for e in range(2):
                t = 8 * tile + 2 * th.c + e
                factors = fr.registers(4)
                cute.autovec_copy(o.factors[t % 4 if s.packed else t, None], factors)
                k, q = -factors[1] * factors[3], factors[2] * factors[3]
                if s.packed:
                    is_k = th.c < 2
                    v = cutlass.select_(is_k, factors[0], F32(0.0))
                    both[0].append((v, cutlass.select_(is_k, k, q)))
                else:
                    both[0].append((factors[0], k))
                    both[1].append((None, q))
            found += both[: 1 if s.packed else 2]
        return found

    def project(self, state, o, th):
        """S0 [k, q]^T of the warp's rows, as sums."""
        s, C = self.shape, self.chains
        p = fr.registers(C * self.token_columns * self.row_tiles * 4, F32, 0.0)
        blocks, held = self.token_columns * s.terms, None
        # four matrices are two products of a block of eight columns, or one of two
        step = 2 if blocks == 1 else 1
        row, quarter = th.lane % 8, th.lane // 8
        place = row * s.stride + quarter * 8
        if step == 1:
            place = (quarter // 2 * 8 + row) * s.stride + quarter % 2 * 8
        for first in range(0, s.products, step):
            # else all matrices of the loop are read at its head, into as many registers as the state has
            if first % 2 == 0:
                cute.arch.sync_warp()
            states = []
            for x in range(first, first + step):
                held = self.part(state, 4 * x, held, th)
                states.append([self.state_as_a(held, m, x) for m in range(self.row_tiles)])
            for pair in range(0, blocks, 2):
                words = fr.registers(8, BF)
                fr.read_matrices(o.x, place + 8 * pair * s.stride + 16 * first, words)
                for i in range(2):
                    x, block = (i, pair) if step == 2 else (0, pair + i)
                    term, chain = block // self.token_columns, (first + x) % C
                    for m in range(self.row_tiles):
                        acc = self.sums_at(p, block % self.token_columns, m, chain)
                        for order in range(min(self.state_terms, HIGHEST_ORDER - term + 1)):
                            fr.mma(acc, states[x][m][order], fr.operand_b(words, 4 * i))
        return p

    def sums_at(self, p, column: int, m: int, chain: int = 0):
        """Of 16 rows and eight columns."""
        return fr.accumulator(p, ((chain * self.token_columns + column) * self.row_tiles + m) * 4)

    def answer(self, p, o, matrices, correlations, x: Corrected, values, th):
        """Corrections and outputs in the sums' places: P', y, and what the tokens of the call do to one another."""
        s = self.shape
        u = self.operands_of(x, self.u_terms)
        scales = self.scales(o, th)
        for m in range(self.row_tiles):
            for column in range(self.token_columns):
                y = self.sums_at(p, column, m)
                for e in range(4):
                    y[e] = y[e] * x.total
                    if self.chains > 1:
                        y[e] = y[e] + self.sums_at(p, column, m, 1)[e] * x.total
        for column in range(self.token_columns):
            ring = correlations[column]
            for m in range(self.row_tiles):
                acc = self.sums_at(p, column, m)
                for piece in range(self.slices):
                    for term in range(TERMS):
                        b = fr.operand_b(ring, (piece * TERMS + term) * 4)
                        for u_term in range(min(self.u_terms, TERMS - term)):
                            fr.mma(acc, fr.operand_a(u, self.u_place(u_term, piece, 2 * m)), b)
        # of a row tile and a tile of tokens its terms
        terms = [
            [self.own_corrections(p, m, tile, scales, values, th) for tile in range(s.tiles)]
            for m in range(self.row_tiles)
        ]
        for column in range(self.token_columns):
            first = self.solution_matrix(column, 0, 0)
            solution = self.read_all(matrices, first, s.tiles * OWN_TERMS, th)
            for tile in range(column // 2 + 1):
                for m in range(self.row_tiles):
                    acc = self.sums_at(p, column, m)
                    for term in range(OWN_TERMS):
                        b = fr.operand_b(solution, 2 * (tile * OWN_TERMS + term), 8)
                        for order in range(OWN_TERMS - term):
                            fr.mma(acc, fr.operand_a(terms[m][tile][order], 0, 8), b, 8)

    def own_corrections(self, p, m: int, tile: int, scales, values, th):
        """y of 16 rows and a tile of tokens in place of P'_k, D P'_q in place of P'_q; returned are y's terms as A."""
        s = self.shape
        k = tile if s.packed else 2 * tile
        y = self.sums_at(p, k, m)
        both = [fr.registers(2), fr.registers(2)]
        for e in range(4):
            by_v, by_p = scales[k][e % 2]
            v = values[(2 * tile + e % 2) * self.octets + 2 * m + e // 2].to(F32)
            y[e] = y[e] * by_p + v * by_v
            if s.tokens < s.N:
                # shared memory has rows of tokens that nobody fills
                y[e] = cutlass.select_(8 * tile + 2 * th.c + e % 2 < s.tokens, y[e], F32(0.0))
            both[e // 2][e % 2] = y[e]
        if not s.packed:
            q = self.sums_at(p, k + 1, m)
            for e in range(4):
                q[e] = q[e] * scales[k + 1][e % 2][1]
        found = []
        for _ in range(OWN_TERMS):
            a = fr.registers(4, BF)
            for half in range(2):
                cute.autovec_copy(fr.split(both[half]), fr.pair(a, 2 * half))
            found.append(a)
        return found

    def read_all(self, matrices, first: int, count: int, th):
        """`count` matrices as B's registers, two of bf16 each."""
        x = fr.registers(2 * (-(-count // 4) * 4), BF)
        for at in range(0, count, 4):
            # three are read as four
            n = min(4, count - at) if count - at != 3 else 4
            # lanes behind those that name a row are not looked at
            place = (first + at) * MATRIX + 8 * (th.lane % (8 * n))
            fr.read_matrices(matrices, place, x, 2 * at, n)
        return x

    @cute.jit
    def store_rows(self, p, mine, row0, th):
        """Corrections to the ring, outputs to theirs."""
        for n in cutlass.range_constexpr(2 * self.shape.tiles):
            t = n // 2 * 8 + 2 * th.c + n % 2
            if const_expr(self.shape.packed):
                if th.c < 2:
                    self.store_u(p, mine, row0, t, 0, n % 2, th)
                else:
                    self.store_output(p, mine, row0, t - 4, 0, n % 2, th)
            else:
                self.store_u(p, mine, row0, t, n // 2 * 2, n % 2, th)
                self.store_output(p, mine, row0, t, n // 2 * 2 + 1, n % 2, th)

    @cute.jit
    def store_u(self, p, mine, row0, t, column: cutlass.Constexpr, e: cutlass.Constexpr, th):
        """A token's corrections of a thread's rows."""
        if t < mine.appended:
            row = mine.u[mine.live.place(mine.live.count + t), None]
            self.store_side_by_side(p, row, row0, column, e, th)

    @cute.jit
    def store_output(self, p, mine, row0, t, column: cutlass.Constexpr, e: cutlass.Constexpr, th):
        """A token's outputs of a thread's rows."""
        if t < mine.tokens:
            self.store_side_by_side(p, mine.out[t, None], row0, column, e, th)

    def store_side_by_side(self, p, to, row0, column: int, e: int, th) -> None:
        x = fr.registers(self.octets)
        for j in range(self.octets):
            x[j] = self.sums_at(p, column, j // 2)[j % 2 * 2 + e]
        stored = fr.registers(self.octets, to.element_type)
        stored.store(x.load().to(to.element_type))
        goal = cute.local_tile(to, (self.octets,), (row0 // self.octets + th.g,))
        cute.autovec_copy(stored, goal)
