"""What a block of `wy_block` computes once of q, k and the gates, where each key has a decay (KDA).

With D_t the product of a key's decays up to token t and D_(t, i) that of tokens i+1..t:

    D_t k_t, D_t q_t           operands of the projection, in two bf16 terms, three of the first two tokens
    D_(T, i) k_i               what u_i meets in the final state, in two
    (k_i D_(t, i)).k_t, .q_t   pairwise in fp32

Each is a product of numbers at most 1, never a quotient, so that nothing overflows at any gate.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from gdntune.kernels import fragments as fr
from gdntune.kernels import shuffles
from gdntune.kernels.wy_block_sums import SharedOut
from gdntune.kernels.wy_operands import FIRST, Operands, Shape, clear_last_row

F32, BF = Float32, BFloat16


class KeyStage:
    """A thread has two neighbouring keys and some tokens; the others of these keys' tokens are in its warp."""

    def __init__(self, decode, shape: Shape, update: bool):
        self.d, self.s, self.update = decode, shape, update
        # threads that share the tokens of two keys
        self.groups = min(2 * shape.threads // shape.K, shape.tokens)
        self.pairs = 32 // self.groups
        self.each = shape.tokens // self.groups
        # products of pairs of tokens in a loop: written out, those of few tokens are as few instructions
        self.rolled = decode.gram_columns == 2 and shape.tokens > 4
        # with more threads than that, the others have nothing to do here
        self.busy = shape.K // 2 * self.groups

    def place(self, th):
        """A thread's pair of keys and its first token."""
        return th.warp * self.pairs + th.lane % self.pairs, th.lane // self.pairs * self.each

    @cute.jit
    def load(self, k, q, g, span, hq, hv, th):
        """Issues the loads of k, q and g."""
        p, first = self.place(th)
        p = cutlass.min(p, self.s.K // 2 - 1)
        rk = cute.make_rmem_tensor((2 * self.each,), k.element_type)
        rq = cute.make_rmem_tensor((2 * self.each,), q.element_type)
        rg = cute.make_rmem_tensor((2 * self.each,), g.element_type)
        if const_expr(span.ragged):
            rk.fill(0)
            rq.fill(0)
            rg.fill(0)
        for i in cutlass.range_constexpr(self.each):
            if span.has(first + i):
                cute.autovec_copy(span.piece(g, first + i, hv, 2, p), fr.pair(rg, 2 * i))
                cute.autovec_copy(span.piece(k, first + i, hq, 2, p), fr.pair(rk, 2 * i))
                cute.autovec_copy(span.piece(q, first + i, hq, 2, p), fr.pair(rq, 2 * i))
        return rk, rq, rg

    def bias(self, dt_bias, head, th):
        """Issues the load of a thread's two biases; None where the gate has none."""
        if dt_bias is None:
            return None
        p, _ = self.place(th)
        x = cute.make_rmem_tensor((2,), dt_bias.element_type)
        cute.autovec_copy(
            cute.local_tile(dt_bias[head, None], (2,), (cutlass.min(p, self.s.K // 2 - 1),)), x
        )
        return x

    @cute.jit
    def fill(self, loaded, A: Float32, bias, o: Operands, span, th, options):
        """Everything of a key but the sums over keys, to shared memory."""
        clear_last_row(self.s, o, th.tid)
        if const_expr(self.busy == self.s.threads):
            self.fill_keys(loaded, A, bias, o, span, th, options)
        else:
            if th.tid < self.busy:
                self.fill_keys(loaded, A, bias, o, span, th, options)

    def fill_keys(self, loaded, A, bias, o: Operands, span, th, options):
        rk, rq, rg = loaded
        p, first = self.place(th)
        decays = self.decays(rg, A, bias, span, first, options)
        k, q = fr.wide(rk, 2 * self.each), fr.wide(rq, 2 * self.each)
        for i in range(self.each):
            t = first + i
            cute.autovec_copy(
                fr.pair(decays, 2 * i), cute.local_tile(o.decays[t, None], (2,), (p,))
            )
            both = fr.registers(4, rk.element_type)
            cute.autovec_copy(fr.pair(rk, 2 * i), fr.pair(both))
            cute.autovec_copy(fr.pair(rq, 2 * i), fr.pair(both, 2))
            cute.autovec_copy(both, o.raw[t, p, None])
        before, after = self.around(decays, th)
        self.fill_projection(k, q, decays, before, first, p, o)
        if self.update:
            self.fill_final(k, decays, after, first, p, o, th)

    def decays(self, rg, A, bias, span, first, options):
        """The thread's decays, 1 where a token is missing."""
        x = fr.registers(2 * self.each)
        g = fr.wide(rg, 2 * self.each)
        b = None if bias is None else bias.load().to(F32)
        for i in range(self.each):
            for e in range(2):
                d = self.d.decay_of(g[2 * i + e], A, F32(0.0) if b is None else b[e], options)
                x[2 * i + e] = cutlass.select_(first + i < span.length, d, F32(1.0))
        return x

    def around(self, decays, th):
        """Of both keys the product of the decays of the tokens before the thread's own, and of those after."""
        before, after = fr.registers(2, F32, 1.0), fr.registers(2, F32, 1.0)
        mine = th.lane // self.pairs
        for e in range(2):
            total = decays[e]
            for i in range(1, self.each):
                total = total * decays[2 * i + e]
            for group in range(self.groups if self.groups > 1 else 0):
                x = shuffles.at_lane(total, group * self.pairs + th.lane % self.pairs)
                before[e] = before[e] * cutlass.select_(mine > group, x, F32(1.0))
                after[e] = after[e] * cutlass.select_(mine < group, x, F32(1.0))
        return before, after

    def fill_projection(self, k, q, decays, before, first, p, o: Operands):
        s = self.s
        word = s.word(p)
        for i in range(self.each):
            for e in range(2):
                before[e] = before[e] * decays[2 * i + e]
            if self.d.tf32:
                self.d.tf32.fill_projection(self.of_token(before, k, q, i), first + i, p, o)
                continue
            for which, x in ((0, k), (1, q)):
                both = fr.registers(2)
                both.store(before.load() * fr.pair(x, 2 * i).load())
                for term in range(s.terms):
                    row = o.x[s.row(term, which, first + i), None]
                    cute.autovec_copy(fr.split(both), cute.local_tile(row, (2,), (word,)))
                if i < FIRST:
                    self.fill_first(both, which, first + i, word, o)

    @cute.jit
    def fill_first(self, rest, which: cutlass.Constexpr, t, word, o: Operands):
        """Of the first tokens what their terms leave, as one more."""
        if t < FIRST:
            goal = o.first[word // 8, t, word % 4, word // 4 % 2, which, None]
            cute.autovec_copy(fr.split(rest), goal)

    def of_token(self, before, k, q, i: int):
        """Decayed k and q of the first key, then of the second."""
        x = fr.registers(4)
        for e in range(2):
            x[2 * e], x[2 * e + 1] = before[e] * k[2 * i + e], before[e] * q[2 * i + e]
        return x

    @cute.jit
    def fill_final(self, k, decays, after, first, p, o: Operands, th):
        s = self.s
        word = s.word(p)
        tokens = fr.registers(4)
        for back in cutlass.range_constexpr(self.each):
            i = const_expr(self.each - 1 - back)
            both = fr.registers(2)
            both.store(after.load() * fr.pair(k, 2 * i).load())
            if const_expr(self.d.tf32 is not None):
                cute.autovec_copy(both, fr.pair(tokens, 2 * (i % 2)))
                if const_expr(i % 2 == 0):
                    self.d.tf32.fill_final(tokens, first + i, p, o)
            for term in cutlass.range_constexpr(0 if self.d.tf32 else s.key_terms):
                row = o.keys[term * s.N + first + i, None]
                cute.autovec_copy(fr.split(both), cute.local_tile(row, (2,), (word,)))
            after.store(after.load() * fr.pair(decays, 2 * i).load())
        if first == 0:
            cute.autovec_copy(after, cute.local_tile(o.decay, (2,), (p,)))

    @cute.jit
    def combine(
        self, o: Operands, th, decay: Float32, beta: Float32, scale: Float32, use_qk_l2norm: Int32
    ):
        """The sums over keys, and what the solution of a row needs; lane t has token t's beta."""
        T, warps = const_expr(self.s.tokens), const_expr(self.s.warps)
        groups = const_expr(T // self.d.gram_columns)
        # warps beyond the columns have the norms, else each warp has some of both
        spare = const_expr(warps - groups if warps > groups else warps)
        shared = const_expr(1 << (min(spare, T).bit_length() - 1))
        first = const_expr(warps - shared)
        warp = th.warp
        if const_expr(self.rolled):
            for p in cutlass.range(warp, groups, warps, unroll=1):
                self.pair_of_columns(p, o, th.lane)
        else:
            if const_expr(warps > groups):
                # other warps in each block: a warp's number decides which scheduler has it
                _, head, _ = cute.arch.block_idx()
                warp = (warp + groups * head) % warps
            for group in cutlass.range_constexpr(groups):
                if warp == group:
                    self.columns(group, o, th.lane)
        if const_expr(first == 0):
            self.norms(warp * (T // shared), T // shared, o, th.lane, beta, scale, use_qk_l2norm)
        else:
            if warp >= first:
                self.norms(
                    (warp - first) * (T // shared),
                    T // shared,
                    o,
                    th.lane,
                    beta,
                    scale,
                    use_qk_l2norm,
                )

    def decays_of(self, o: Operands, t, lane):
        """A lane's share of a token's decays."""
        x = fr.registers(self.s.K // 32)
        cute.autovec_copy(cute.local_tile(o.decays[t, None], (self.s.K // 32,), (lane,)), x)
        return x

    def keys_of(self, o: Operands, t, lane):
        """A lane's share of a token's k and q, as fp32."""
        n = self.s.K // 32
        source = cute.make_tensor(o.raw[t, None, None].iterator, cute.make_layout((2 * self.s.K,)))
        x = cute.make_rmem_tensor((2 * n,), source.element_type)
        cute.autovec_copy(cute.local_tile(source, (2 * n,), (lane,)), x)
        y = fr.wide(x, 2 * n)
        return tuple([y[4 * (z // 2) + 2 * which + z % 2] for z in range(n)] for which in range(2))

    @cute.jit
    def pair_of_columns(self, p: Int32, o: Operands, lane):
        """A warp: columns p and T - 1 - p of both Gram matrices, 2 T sums over K. Few instructions, which any p has: they come from
        memory in the time that few requests take.

        In T + 1 steps: column p from its diagonal down, then the other from its own. Step s gives an element of either matrix,
        but where a column starts of q's alone: there the first diagonal's has its place.
        """
        T, n = const_expr(self.s.tokens), const_expr(self.s.K // 32)
        sums = SharedOut(lane)
        x, q = self.keys_of(o, p, lane)
        first = self.product(x, q)
        for s in cutlass.range_constexpr(1, T + 1):
            starts = p == T - s
            t = cutlass.select_(p < T - s, p + s, Int32(s - 1))
            d = self.decays_of(o, t, lane)
            k, q = self.keys_of(o, t, lane)
            decayed = [x[z] * d[z] for z in range(n)]
            sums.add(cutlass.select_(starts, first, self.product(decayed, k)))
            x = [cutlass.select_(starts, k[z], decayed[z]) for z in range(n)]
            sums.add(self.product(x, q))
        (total,) = sums.totals()
        self.write_pair(p, total, sums.number(), o, lane)

    @cute.jit
    def write_pair(self, p: Int32, total: Float32, number: Int32, o: Operands, lane):
        """The sum with a number: twice a step, of k's matrix and of q's."""
        T = const_expr(self.s.tokens)
        each = const_expr(32 // (2 * T))
        is_q = number % 2 == 1
        s = number // 2 + 1
        if s == T - p and not is_q:
            # the first diagonal
            is_q = s > 0
            s = Int32(0)
        down = s < T - p
        t = cutlass.select_(down, p + s, s - 1)
        i = cutlass.select_(down, p, T - 1 - p)
        if lane % each == 0:
            o.gram[cutlass.select_(is_q, Int32(1), Int32(0)), t, i] = total

    def columns_of(self, group: int) -> list[int]:
        """A group's columns: p and T - 1 - p of some p, as many pairs of tokens in each group."""
        T, groups = self.s.tokens, self.s.tokens // self.d.gram_columns
        some = [p for p in range(T // 2) if p % (2 * groups) in (group, 2 * groups - 1 - group)]
        return [*some, *(T - 1 - p for p in some)]

    def columns(self, group: int, o: Operands, lane) -> None:
        """A warp: some columns of both Gram matrices, a sum over K a place. Row after row, each of which is read once."""
        columns = self.columns_of(group)
        decayed: dict[int, Any] = {}
        sums, places = SharedOut(lane), []
        for t in range(min(columns), self.s.tokens):
            k, q = self.keys_of(o, t, lane)
            d = self.decays_of(o, t, lane) if decayed else None
            for i, x in decayed.items():
                decayed[i] = [a * d[z] for z, a in enumerate(x)]
            for i, x in sorted(decayed.items()):
                sums.add(self.product(x, k))
                places.append((0, t, i))
            if t in columns:
                decayed[t] = k
            for i, x in sorted(decayed.items()):
                sums.add(self.product(x, q))
                places.append((1, t, i))
        self.write_columns(sums, places, o, lane)

    def squares(self, o: Operands, t, lane):
        """A lane's part of a token's k.k and q.q."""
        k, q = self.keys_of(o, t, lane)
        return self.product(k, k), self.product(q, q)

    def product(self, x, y):
        """A lane's part of x.y."""
        total = x[0] * y[0]
        for a, b in zip(x[1:], y[1:], strict=True):
            total = total + a * b
        return total

    @cute.jit
    def write_columns(self, sums: cutlass.Constexpr, places: cutlass.Constexpr, o: Operands, lane):
        """Sums to their places (which, t, i), in the order in which they were added."""
        N = const_expr(self.s.N)
        at = [(which * N + t) * N + i for which, t, i in places]
        flat = cute.make_tensor(o.gram.iterator, cute.make_layout((2 * N * N,)))
        for total, place, there in sums.shares(at):
            if there:
                flat[place] = total

    @cute.jit
    def norms(
        self,
        first: Int32,
        count: cutlass.Constexpr,
        o: Operands,
        lane,
        beta: Float32,
        scale,
        use_qk_l2norm,
    ):
        """A warp: norms of tokens first to first + count - 1, a power of two."""
        sums = cute.make_rmem_tensor((2 * count,), F32)
        for t in cutlass.range_constexpr(count):
            sums[t], sums[count + t] = self.squares(o, first + t, lane)
        shuffles.sums_shared_out(sums, 2 * count, lane)
        # lanes of the upper half have q's
        iq, ik = self.d.norms(shuffles.bfly(sums[0], 16), sums[0], scale, use_qk_l2norm)
        each = const_expr(16 // count)
        t = first + lane % 16 // each
        b = shuffles.at_lane(beta, t)
        if lane % each == 0 and lane < 16:
            values = cute.make_rmem_tensor((4,), F32)
            values[0] = b * ik
            values[1] = b * ik * ik
            values[2] = iq
            values[3] = F32(1.0)
            cute.autovec_copy(values, o.factors[t, None])
