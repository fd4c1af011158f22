"""Gated delta rule decode of several tokens at once, on tensor cores, by blocks that work together: GDN and KDA.

With S0 the state before the call [V, K], F[t, i] the product of the decays of tokens i+1..t, D[t] that of all up to t:

    P   = [k, q] S0^T                                            tensor cores, the state going from memory to operand
    u_t = beta_t (v_t - D_t P_k[t] - sum_(i<t) F[t, i] (k_i.k_t) u_i)      a thread a row of V
    o_t = D_t P_q[t] + sum_(i<=t) F[t, i] (k_i.q_t) u_i
    S_T = D_T S0 + sum_i F[T, i] u_i k_i^T                       tensor cores, where the final state is kept

What depends on q, k and the gates alone is computed once a block into shared memory (`wy_block_gdn`, `wy_block_kda`); warps own rows
of V and all of K, `rows` at a time. Operands are bf16, sums fp32: what is wider than bf16 is a sum of bf16 terms.

What terms lose. A bf16 number has 8 bits, so one term leaves at most 2^-8 of x, two leave 2^-17, three 2^-26. Of u k, u and KDA's
decayed key in two terms each, that is 2^-16 |u k|. The tolerance for one token is 2^-18 (|S| + 2 rms of S's row), S = D S0 + u k, and a
bf16 state shows it where S lies next to the middle between two bf16 numbers. So two terms can fail, and most where D S0 and u k nearly
cancel; in three terms, of whose products those of orders 0 to 2 are summed, at most 2^-24 |u k| is lost, as by fp32 itself.
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates
from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block_ahead import Ahead
from gdntune.kernels.wy_block_columns import Columns
from gdntune.kernels.wy_block_gdn import RowStage
from gdntune.kernels.wy_block_kda import KeyStage
from gdntune.kernels.wy_block_lines import Lines
from gdntune.kernels.wy_block_tf32 import Tf32, rows_of_u
from gdntune.kernels.wy_operands import SPAN_DECAYS, Operands, Shape, allocate

F32, BF = Float32, BFloat16
# of bf16, that hold a significand
TERMS = {"bf16": 1, "fp16": 2, "fp32": 3}
# products of terms whose orders add up to more than this are below fp32's roundoff
HIGHEST_ORDER = 2


# of four tokens in three terms, the first twice: 16 elements, and what makes an odd number of 16 bytes
PACKED_STRIDE = 24


def third_stride(N: int) -> int:
    """A row of u in three terms."""
    return 3 * N + 8 + (8 if (3 * N + 8) // 8 % 2 == 0 else 0)


@dataclasses.dataclass(frozen=True)
class Span:
    """Which tokens a request has: row of q, first token there, how many."""

    row: Any
    first: Any
    length: Any
    ragged: bool

    def has(self, t):
        """Whether to read token t: of a request that is not ragged, always."""
        return t < self.length if self.ragged else True

    def token(self, t):
        """Where token t lies; the last one for those that are missing."""
        return self.first + (t if self.ragged else cutlass.min(t, self.length - 1))


class Inputs(NamedTuple):
    """What the tokens bring, as it comes: the stage's share, a token's gate and beta a lane, a row of v."""

    keys: Any
    gate: Any
    beta: Any
    values: Any


@dataclasses.dataclass(frozen=True)
class Rows:
    """A warp's shared memory: projections p [rows, 2N + 4] fp32, and u [rows, .] bf16, its terms for the final state."""

    p: Any
    u: Any


class WYBlock(decode.Decode):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        self.rows, self.row_warps, self.passes = knobs["rows"], knobs["warps"], knobs["passes"]
        threads = knobs["threads"]
        super().__init__(
            facts,
            self.rows * self.row_warps * self.passes,
            threads,
            knobs["registers"],
            pdl=knobs["pdl"],
        )
        # of u and of a decayed key, where they meet in the final state
        self.u_terms = knobs.get("terms", 2)
        # third terms of u meet the key's first and the key's third u's first, in one product
        self.paired = self.u_terms == 3 and self.per_k
        if self.u_terms == 3 and not self.paired:
            # up to four tokens are not packed then: a product has no place for the third term
            self.tokens = max(self.tokens, 8)
        self.state_terms = TERMS[facts["state_dtype"]]
        self.octets = self.rows // 8
        self.columns_by = Columns(self) if knobs["matrices"] else None
        self.lines_by = Lines(self) if knobs.get("lines") else None
        self.ahead = Ahead(self, knobs["ahead"]) if knobs.get("ahead") else None
        self.tf32 = Tf32(self) if knobs.get("tf32") else None
        # whether a final state goes to memory as it is computed
        self.stores_early = self.lines_by is not None or self.tf32 is not None
        vec = 16 // (self.state_dtype.width // 8)
        k_terms = TERMS[facts["input_dtype"]]
        self.shape = Shape(
            self.K,
            self.tokens,
            vec,
            3 if self.per_k else k_terms,
            self.u_terms if self.per_k else k_terms,
            threads,
            knobs["matrices"],
            self.tf32 is not None,
        )
        if self.per_k:
            self.stage = KeyStage(self, self.shape, self.update)
        else:
            self.stage = RowStage(self, self.shape)
        # a thread's share of a row
        self.share = self.K // 4
        # two accumulators where a warp's rows alone do not fill mma's latency
        self.chains = 2 if self.octets * self.shape.tiles < 4 and not self.tf32 else 1

    def row_of(self, octet, g):
        """The row of V, of a warp's, that lanes g have in an octet."""
        if self.columns_by:
            return self.columns_by.row_of(octet, g)
        return 8 * octet + g if self.k_last else self.octets * g + octet

    def runs(self, tile, row0, th):
        """Pairs of 16 bytes of k_last memory and the place of their first element in registers."""
        vec = self.shape.vec
        for j in range(self.octets):
            row = tile[row0 + self.row_of(j, th.g), None]
            for r in range(self.share // vec):
                yield cute.local_tile(row, (vec,), (4 * r + th.c,)), j * self.share + r * vec, vec

    def columns(self, tile, row0, th):
        """The same for v_last memory: a thread's rows of one key lie side by side."""
        vec = self.shape.vec
        for i in range(self.share):
            key = (i // vec * 4 + th.c) * vec + i % vec
            yield (
                cute.local_tile(tile[key, None], (self.octets,), (row0 // self.octets + th.g,)),
                i * self.octets,
                self.octets,
            )

    def load_state(self, tile, row0, th):
        """Issues the loads of a warp's rows; what they give is `turned` before use."""
        if self.columns_by:
            return self.columns_by.load(tile, row0, th)
        if self.lines_by:
            return self.lines_by.load(tile, row0, th)
        x = cute.make_rmem_tensor((self.octets * self.share,), self.state_dtype)
        for source, at, n in (self.runs if self.k_last else self.columns)(tile, row0, th):
            cute.autovec_copy(source, cute.make_tensor(x.iterator + at, cute.make_layout((n,))))
        return x

    def store_state(self, x, tile, row0, th):
        if self.columns_by:
            self.columns_by.store(x, tile, row0, th)
            return
        x = self.turned(x, th, back=True)
        for goal, at, n in (self.runs if self.k_last else self.columns)(tile, row0, th):
            cute.autovec_copy(cute.make_tensor(x.iterator + at, cute.make_layout((n,))), goal)

    def turned(self, x, th=None, back=False):
        """Between what a thread reads and what operands have: of v_last, rows side by side and keys side by side."""
        if self.lines_by:
            return self.lines_by.turned(x, th)
        if self.k_last or self.columns_by:
            return x
        y = cute.make_rmem_tensor((self.octets * self.share,), self.state_dtype)
        for j in range(self.octets):
            for i in range(self.share):
                rows, keys = i * self.octets + j, j * self.share + i
                if back:
                    y[rows] = x[keys]
                else:
                    y[keys] = x[rows]
        return y

    def state_operands(self, raw, j: int, x: int):
        """The state's part in product x of an octet as operands, a term each."""
        at = j * self.share + 4 * x
        if self.columns_by:
            raw, at = self.columns_by.turned(raw, j, x), 0
        if self.state_dtype is BF:
            return [fr.operand_b(raw, at)]
        found = []
        words = [fr.wide(fr.pair(raw, at + 2 * f), 2) for f in range(2)]
        for _ in range(self.state_terms):
            b = fr.registers(4, BF)
            for f in range(2):
                cute.autovec_copy(fr.split(words[f]), fr.pair(b, 2 * f))
            found.append(fr.operand_b(b))
        return found

    def project(self, raw, o: Operands, th, sP) -> None:
        """P of the warp's rows: first k's, then q's."""
        if self.tf32:
            self.tf32.project(raw, o, th, sP)
            return
        s, C = self.shape, self.chains
        p = fr.registers(C * s.tiles * self.octets * 4, F32, 0.0)
        bases = [s.place_a(th, a) for a in range(s.fragments)]
        for x in range(s.products):
            states = [self.state_operands(raw, j, x) for j in range(self.octets)]
            for a in range(s.fragments):
                A = fr.registers(8, BF)
                fr.read_matrices(o.x, bases[a] + 16 * x, A)
                chain = (a if s.fragments > s.tiles else x) % C
                for order in range(self.state_terms):
                    if s.first_term(a) + order > HIGHEST_ORDER:
                        continue
                    for j in range(self.octets):
                        acc = fr.accumulator(
                            p, ((chain * s.tiles + s.tile(a)) * self.octets + j) * 4
                        )
                        fr.mma(acc, fr.operand_a(A), states[j][order])
        for n in range(s.tiles):
            for j in range(self.octets):
                self.write_projection(p, n, j, th, sP)

    def write_projection(self, p, n: int, j: int, th, sP) -> None:
        s = self.shape
        at = (n * self.octets + j) * 4
        y = [p[at + e] for e in range(4)]
        if self.chains > 1:
            y = [y[e] + p[s.tiles * self.octets * 4 + at + e] for e in range(4)]
        for e in range(2):
            row = self.row_of(j, 2 * th.c + e)
            if s.packed:
                sP[row, th.g] = y[e] + y[2 + e]
            else:
                sP[row, 8 * n + th.g] = y[e]
                sP[row, s.N + 8 * n + th.g] = y[2 + e]

    @cute.jit
    def solve(self, o: Operands, sm, values, th, store, span, out):
        """A row of V a thread. With x_i = u_i / |k_i|: x_t = beta / |k_t| (v_t - (D_t P_k[t] + sum_(i<t) L[t, i] x_i) / |k_t|)."""
        N = const_expr(self.shape.N)
        row = th.lane % self.rows
        p = cute.make_rmem_tensor((2 * N,), F32)
        cute.autovec_copy(cute.local_tile(sm.p[row, None], (2 * N,), (0,)), p)
        u = cute.make_rmem_tensor((N,), F32)
        line = cute.make_rmem_tensor((N,), F32)
        factors = cute.make_rmem_tensor((4,), F32)
        for t in cutlass.range_constexpr(self.tokens):
            cute.autovec_copy(o.factors[t, None], factors)
            x = p[t]
            y = p[N + t]
            if const_expr(not self.per_k):
                x = x * factors[3]
                y = y * factors[3]
            cute.autovec_copy(o.gram[0, t, None], line)
            for i in cutlass.range_constexpr(t):
                x = x + line[i] * u[i]
            u[t] = values[t].to(F32) * factors[0] - x * factors[1]
            cute.autovec_copy(o.gram[1, t, None], line)
            for i in cutlass.range_constexpr(t + 1):
                y = y + line[i] * u[i]
            p[N + t] = y * factors[2]
        if const_expr(self.update):
            self.keep_u(u, o, sm.u, row)
        results = cute.make_rmem_tensor((N,), out.element_type)
        results.store(
            cute.make_tensor(p.iterator + N, cute.make_layout((N,))).load().to(out.element_type)
        )
        end = cutlass.select_(store, span.length, Int32(0))
        for t in cutlass.range_constexpr(self.tokens):
            if t < end:
                out[t, row] = results[t]

    def keep_u(self, u, o: Operands, sU, row) -> None:
        """F[T, i] u_i in two terms; of each eight tokens the first terms, then the others. Behind them third terms, if there are such.

        Packed: behind the terms of four tokens again the first and the third.
        """
        if self.tf32:
            self.tf32.keep_u(u, sU, row)
            return
        N, width = self.shape.N, min(self.shape.N, 8)
        again = self.paired and self.shape.packed
        w = fr.registers(4 * N if again else self.u_terms * N, BF)
        after = None
        if not self.per_k:
            after = fr.registers(N)
            source = cute.make_tensor(o.decay.iterator + SPAN_DECAYS, cute.make_layout((N,)))
            cute.autovec_copy(source, after)
        for t in range(0, N, 2):
            both = fr.registers(2)
            for e in range(2):
                both[e] = u[t + e] if after is None else u[t + e] * after[t + e]
            at = t // width * 2 * width + t % width
            for term in range(2):
                cute.autovec_copy(fr.split(both), fr.pair(w, at + term * width))
            if again:
                cute.autovec_copy(fr.pair(w, at), fr.pair(w, 2 * N + t))
                cute.autovec_copy(fr.split(both), fr.pair(w, 3 * N + t))
            elif self.u_terms == 3:
                cute.autovec_copy(fr.split(both), fr.pair(w, 2 * N + t))
        cute.autovec_copy(w, cute.local_tile(sU[row, None], (cute.size(w.shape),), (0,)))

    def read_u(self, sU, th):
        """u as A's registers: of each two octets and tile of tokens four registers, two where tokens are few."""
        s = self.shape
        pairs, size = self.octets // 2, 4 if s.packed else 8
        w = fr.registers(pairs * s.tiles * size, BF)
        stride = sU.stride[0]
        for m in range(pairs):
            for n in range(s.tiles):
                row = self.row_of(2 * m + th.lane // 8 % 2, th.lane % 8)
                place = row * stride + 16 * n
                if s.packed:
                    fr.read_matrices(sU, place, w, m * 4, 2)
                else:
                    fr.read_matrices(sU, place + th.lane // 16 * 8, w, (m * s.tiles + n) * 8)
        return w

    def read_third(self, sU, th):
        """u's third terms as A's registers of half a product: of each two octets and tile of tokens two.

        Packed: the first terms, then the third ones.
        """
        if self.u_terms == 2:
            return None
        s = self.shape
        pairs = self.octets // 2
        w = fr.registers(pairs * s.tiles * 4, BF)
        for m in range(pairs):
            row = self.row_of(2 * m + th.lane // 8 % 2, th.lane % 8)
            for n in range(s.tiles):
                place = row * sU.stride[0] + 2 * s.N + 8 * n
                fr.read_matrices(sU, place, w, (m * s.tiles + n) * 4, 2)
        return w

    def key_place(self, o: Operands, th, group: int):
        """Where a lane's row of the keys' operand begins, for four matrices, and how many columns of eight they are.

        Both terms of u meet the same keys. Packed: k's terms lie along the contraction too, if there are two. Packed, group 1: k's third
        terms and then its first, which meet u's first and third.
        """
        s = self.shape
        row, matrix = th.lane % 8, th.lane // 8
        if s.packed:
            t = row % 4
            if group == 1:
                term = cutlass.select_(row < 4, Int32(2), Int32(0))
                return (term * s.N + t) * s.stride + matrix * 8
            terms = min(s.key_terms, 2)
            term = matrix % 2 if terms == 2 else 0
            at = term * s.N + t if self.per_k else s.row(term, 0, t)
            return at * s.stride + matrix // terms * 8
        term, n = group // s.tiles, group % s.tiles
        at = term * s.N + 8 * n + row if self.per_k else s.row(term, 0, 8 * n) + row
        return at * s.stride + matrix * 8

    def advance(self, raw, o: Operands, th, sm, goal=None) -> None:
        """The final state, rounded, in place of S0.

        goal: of whole lines, which go to memory as they are computed, where to: the head's state, the first row and whether to write.
        """
        if self.columns_by:
            self.columns_by.advance(raw, o, th, sm)
            return
        if self.tf32:
            self.tf32.advance(raw, o, th, sm, *goal)
            return
        s = self.shape
        w = self.read_u(sm.u, th)
        third = self.read_third(sm.u, th)
        groups = s.groups
        # columns of eight keys that four matrices are
        step = s.step
        keys = o.keys if self.per_k else o.x
        places = [self.key_place(o, th, group) for group in range(groups)]
        total = None if self.per_k else o.decay[0]
        for first in range(0, self.share // 2, step):
            words = fr.registers(groups * 8, BF)
            for group in range(groups):
                count = s.matrices(group)
                fr.read_matrices(
                    keys, places[group] + 8 * first, words, 8 * group, count, transpose=True
                )
            decays = self.decays_of(o, th, first, step, total)
            for i in range(step):
                for m in range(self.octets // 2):
                    self.advance_two(raw, w, third, words, fr.pair(decays, 2 * i), first + i, i, m)
            if self.lines_by:
                tile, row0, writes = goal
                self.lines_by.store(raw, tile, row0, th, writes, first, first + step)

    def decays_of(self, o: Operands, th, first: int, step: int, total):
        """D_T of a thread's keys of some columns."""
        x = fr.registers(2 * step)
        if total is not None:
            x.fill(total)
            return x
        vec = self.shape.vec
        for at in range(0, 2 * step, min(vec, 2 * step)):
            n = min(vec, 2 * step)
            i = 2 * first + at
            key = (i // vec * 4 + th.c) * vec + i % vec
            source = cute.make_tensor(
                o.decay.iterator + cute.assume(key, divby=n), cute.make_layout((n,))
            )
            cute.autovec_copy(source, cute.make_tensor(x.iterator + at, cute.make_layout((n,))))
        return x

    def advance_two(self, raw, w, third, words, decays, column: int, i: int, m: int) -> None:
        """Two octets of rows, eight keys."""
        s = self.shape
        x = fr.registers(4)
        places = [(2 * m + half) * self.share + 2 * column for half in range(2)]
        for half in range(2):
            fr.pair(x, 2 * half).store(
                fr.wide(fr.pair(raw, places[half]), 2).load() * decays.load()
            )
        acc = fr.accumulator(x)
        if s.packed and s.key_terms == 1:
            fr.mma(acc, fr.operand_a(w, 4 * m, 8), fr.operand_b(words, 2 * i, 8), 8)
        elif s.packed:
            # both terms of k meet the same u
            a = fr.registers(8, BF)
            for f in range(2):
                for half in range(2):
                    cute.autovec_copy(fr.pair(w, 4 * m + 2 * half), fr.pair(a, 4 * f + 2 * half))
            fr.mma(acc, fr.operand_a(a), fr.operand_b(words, 4 * i))
            if third is not None:
                b = fr.operand_b(words, 8 + 2 * i, 8)
                fr.mma(acc, fr.operand_a(third, 4 * m, 8), b, 8)
        else:
            for group in range(min(s.key_terms, 2) * s.tiles):
                b = fr.registers(4, BF)
                for f in range(2):
                    cute.autovec_copy(fr.pair(words, 8 * group + 2 * i), fr.pair(b, 2 * f))
                fr.mma(acc, fr.operand_a(w, (m * s.tiles + group % s.tiles) * 8), fr.operand_b(b))
            for n in range(s.tiles if self.paired else 0):
                # u's first terms with the keys' third, u's third with the keys' first
                at = m * s.tiles + n
                a, b = fr.registers(8, BF), fr.registers(4, BF)
                for half in range(2):
                    cute.autovec_copy(fr.pair(w, 8 * at + 2 * half), fr.pair(a, 2 * half))
                    cute.autovec_copy(fr.pair(third, 4 * at + 2 * half), fr.pair(a, 4 + 2 * half))
                for f, group in enumerate((2 * s.tiles + n, n)):
                    cute.autovec_copy(fr.pair(words, 8 * group + 2 * i), fr.pair(b, 2 * f))
                fr.mma(acc, fr.operand_a(a), fr.operand_b(b))
            for n in range(s.tiles if third is not None and not self.paired else 0):
                # with the keys' first terms
                a = fr.operand_a(third, (m * s.tiles + n) * 4, 8)
                fr.mma(acc, a, fr.operand_b(words, 8 * n + 2 * i, 8), 8)
        for half in range(2):
            fr.pair(raw, places[half]).store(fr.pair(x, 2 * half).load().to(self.state_dtype))

    @cute.jit
    def load_values(self, v, span, hv, row):
        """Issues the loads of a row of v."""
        x = cute.make_rmem_tensor((self.tokens,), v.element_type)
        if const_expr(self.ragged):
            x.fill(0)
        for t in cutlass.range_constexpr(self.tokens):
            if span.has(Int32(t)):
                x[t] = v[span.row, span.token(Int32(t)), hv, row]
        return x

    @cute.jit
    def load_gates(self, a, b, span, hv, lane):
        """Lane t: token t's gate, where a head has one, and beta, as they came."""
        ga = F32(0.0)
        gb = F32(0.0)
        if const_expr(self.ragged):
            if lane < span.length:
                gb = b[span.row, span.first + lane, hv].to(F32)
                if const_expr(not self.per_k):
                    ga = a[span.row, span.first + lane, hv].to(F32)
        else:
            gb = b[span.row, span.token(lane), hv].to(F32)
            if const_expr(not self.per_k):
                ga = a[span.row, span.token(lane), hv].to(F32)
        return ga, gb

    @cute.jit
    def load_inputs(self, q, k, v, a, b, span, hq, hv, row0, row, th):
        """Issues the loads of what the tokens bring; row: the thread's, of its warp's from row0 on."""
        if const_expr(self.per_k):
            keys = self.stage.load(k, q, a, span, hq, hv, th)
        else:
            keys = self.stage.load(k, q, span, hq, th.tid)
        gate, beta = self.load_gates(a, b, span, hv, th.lane)
        return Inputs(keys, gate, beta, self.load_values(v, span, hv, row0 + row))

    def rows_memory(self, smem, warp) -> Rows:
        """A warp's own shared memory; warps without rows are given the last one's."""
        W, R, N = self.row_warps, self.rows, self.shape.N
        w = cutlass.min(warp, W - 1)
        P = 2 * N + 4
        p = smem.allocate_tensor(F32, cute.make_layout((W, R, P), stride=(R * P, P, 1)), 16)
        if not self.update:
            return Rows(p[w, None, None], None)
        if self.tf32:
            u = smem.allocate_tensor(F32, rows_of_u(W, R), 16)
            return Rows(p[w, None, None], u[w, None, None])
        U = 2 * N if self.shape.packed else 2 * N + 8
        if self.paired and self.shape.packed:
            U = PACKED_STRIDE
        elif self.u_terms == 3:
            # an odd number of 16 bytes, so that eight rows lie in different banks
            U = third_stride(N)
        u = smem.allocate_tensor(BF, cute.make_layout((W, R, U), stride=(R * U, U, 1)), 16)
        return Rows(p[w, None, None], u[w, None, None])

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        th = fr.Thread.here()
        vt, hv, n = self.place()
        hq, in_group = divmod(hv, heads)
        self.await_producer("first")
        slot, write_slot = self.slots_of(n, read_index, write_index, slot_index, accepted, columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)
        span = Span(ni, t0, length, self.ragged)
        v0 = vt * self.tile_v
        row0 = v0 + cutlass.min(th.warp, self.row_warps - 1) * (self.rows * self.passes)
        row = th.lane % self.rows

        # what does not hang on the slot is loaded while the slot's index is on its way
        ah = hv
        dh = hv
        if const_expr(A_log is not None and self.per_k):
            if A_shared:
                ah = hq
            if dt_shared:
                dh = hq
        A = F32(0.0) if const_expr(A_log is None) else A_log[ah].to(F32)
        bias = None
        if const_expr(self.per_k):
            bias = self.stage.bias(dt_bias, dh, th)
        elif const_expr(dt_bias is not None):
            bias = dt_bias[dh].to(F32)
        early = None
        if const_expr(self.pdl != "state"):
            early = self.load_inputs(q, k, v, a, b, span, hq, hv, row0, row, th)
        cute.arch.sync_warp()

        live, writes = self.named(slot, write_slot, slots, null_index)
        if live:
            source = state[Int64(slot), hv, None, None]
            came = self.load_state(source, row0, th)
            if const_expr(self.ahead is not None):
                later = self.ahead.request(n)
                later_slot = later
                if const_expr(self.pool):
                    later_slot = read_index[later]
                self.ahead.ask_tokens(later, q, k, v, a, n, length, hq, in_group == 0, hv, v0, th)
            inputs = early
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                inputs = self.load_inputs(q, k, v, a, b, span, hq, hv, row0, row, th)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            smem = SmemAllocator()
            o = allocate(smem, self.shape, self.per_k, self.update, k.element_type)
            sm = self.rows_memory(smem, th.warp)
            beta = cutlass.select_(
                th.lane < length, self.beta_of(inputs.beta, beta_scale), F32(0.0)
            )
            decay = F32(1.0)
            if const_expr(self.per_k):
                self.stage.fill(
                    inputs.keys,
                    A,
                    bias,
                    o,
                    span,
                    th,
                    softplus_beta,
                    softplus_threshold,
                    lower_bound,
                )
            else:
                decay = gates.decay(
                    self.gate, inputs.gate, A, bias, softplus_beta, softplus_threshold, lower_bound
                )
                decay = cutlass.select_(th.lane < length, decay, F32(1.0))
                self.stage.fill(inputs.keys, o, th.tid)
            if const_expr(self.ahead is not None):
                # by now the index is there
                self.ahead.ask_state(later, later_slot, state, n, hv, v0, slots, null_index, th)
            cute.arch.sync_threads()
            self.stage.combine(o, th, decay, beta, scale, use_qk_l2norm)
            values = inputs.values
            for it in cutlass.range_constexpr(self.passes):
                first = row0 + it * self.rows
                raw = self.turned(came, th)
                self.project(raw, o, th, sm.p)
                if const_expr(it == 0):
                    cute.arch.sync_threads()
                else:
                    cute.arch.sync_warp()
                mine = values
                if const_expr(it + 1 < self.passes and self.tf32 is None):
                    came = self.load_state(source, first + self.rows, th)
                    values = self.load_values(v, span, hv, first + self.rows + row)
                    cute.arch.sync_warp()
                if th.warp < self.row_warps:
                    out = cute.domain_offset((t0, first), output[ni, None, hv, None])
                    self.solve(o, sm, mine, th, th.lane < self.rows, span, out)
                    cute.arch.sync_warp()
                    if const_expr(it + 1 < self.passes and self.tf32 is not None):
                        # for their registers there is no room beside the solution's
                        came = self.load_state(source, first + self.rows, th)
                        values = self.load_values(v, span, hv, first + self.rows + row)
                        cute.arch.sync_warp()
                    if const_expr(self.update and self.stores_early):
                        tile = state[Int64(write_slot), hv, None, None]
                        self.advance(raw, o, th, sm, (tile, first, writes))
                    elif const_expr(self.update):
                        self.advance(raw, o, th, sm)
                        if writes:
                            self.store_state(
                                raw, state[Int64(write_slot), hv, None, None], first, th
                            )
        else:
            self.await_producer("state")
            self.zero_rows(output, ni, t0, length, hv, v0, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(WYBlock(facts, knobs), facts, options, prefix)
