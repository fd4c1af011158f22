"""Gated delta rule decode of drafts behind a ring of corrections: the state is read once, and written where the ring is folded in.

A ring keeps of each accepted token that the state lacks its key k_i as it came, x_i = u_i / |k_i| and its decay. With L of them, F_i the
product of the decays behind entry i and R that of all,

    S_L = R S0 + sum_i F_i x_i k_i^T                             the state that the call starts from; never formed, unless it is folded
    P'  = [k, q] S_L^T = R P + (G F) x,  G = [k, q] k_ring^T     tensor cores; P = [k, q] S0^T as in `wy_block`

and from there on all is as in `wy_block`. A thread's share of x is its operand in both products, so it never meets shared memory.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates
from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block import HIGHEST_ORDER, Rows, Span, WYBlock
from gdntune.kernels.wy_block_gdn import CHUNK, RowStage
from gdntune.kernels.wy_operands import Shape, allocate, matrix

F32, BF = Float32, BFloat16
# of bf16, that hold a correction as it is kept, and one times a decay
TERMS_KEPT = {"bf16": 1, "fp32": 2}
U_TERMS = 2


@dataclasses.dataclass(frozen=True)
class KeyShape(Shape):
    """Of the ring's keys as an operand: a row an entry, its terms one after the other."""

    entries: int = 0

    def row(self, term, which, t):
        return term * self.entries + t


@dataclasses.dataclass(frozen=True)
class KeyRows:
    """The ring's keys in shared memory, [terms * entries, stride] bf16, where `RowStage` looks for them."""

    x: Any


@dataclasses.dataclass(frozen=True)
class Live:
    """A request's window of a ring: `count` rows from `base` on, cyclically, of `rows`."""

    base: Any
    count: Any
    rows: Any

    def place(self, i):
        """The row of entry i; those behind the live ones are where new tokens go."""
        at = self.base + i
        return Int64(cutlass.select_(at >= self.rows, at - self.rows, at))


@dataclasses.dataclass(frozen=True)
class Appended:
    """Where a thread's new corrections go: u [rows, V] of its head, and how many."""

    u: Any
    live: Live
    tokens: Any


@dataclasses.dataclass(frozen=True)
class Corrected:
    """Where a warp's projections go, p [rows, 2N + 4] fp32, and what they lack of the ring: its keys, its corrections as they came,
    F of a lane's entry, and R.
    """

    p: Any
    keys: Any
    u: Any
    after: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Mine:
    """What a block's rows are read from and written to: a head's states, whether it is folded, and v and the output."""

    source: Any
    goal: Any
    folds: Any
    v: Any
    hv: Any
    span: Any
    out: Any


class Ring(WYBlock):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, {**knobs, "pdl": "none", "matrices": False})
        self.ring, self.u_dtype = facts["ring"], decode.DTYPES[facts["ring_dtype"]]
        self.u_terms = TERMS_KEPT[facts["ring_dtype"]]
        s = self.shape
        self.keys = KeyShape(
            s.K, s.tokens, s.vec, s.terms, s.key_terms, s.threads, entries=self.ring
        )
        self.key_stage = RowStage(self, self.keys)
        # of 16 entries, which one product adds up
        self.slices = self.ring // 16
        self.pieces = -(-self.ring * (s.K // CHUNK) // s.threads)

    def row_of(self, octet, g):
        """Rows side by side: a thread's corrections of an entry are one load."""
        return self.octets * g + octet

    @cute.jit
    def gated_delta_rule_ring(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        stream: CUstream,
    ):  # fmt: skip
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(ring_k, 3, None), self.view(ring_u, 3, None), self.view(ring_decay, 3, None),
            self.view(ring_base, 1), self.view(ring_count, 1), flush_min, append,
            heads, state.shape[0], q.shape[1], ring_u.shape[2],
        ).launch(
            grid=(self.V // self.tile_v, HV, output.shape[0]), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident else None,
        )  # fmt: skip

    @cute.jit
    def load_corrections(self, u, live, row0, th):
        """Issues the loads of a thread's corrections: of entries 2c, 2c + 1, 2c + 8, 2c + 9 of each 16, its rows side by side."""
        x = cute.make_rmem_tensor((4 * self.slices * self.octets,), self.u_dtype)
        x.fill(0)
        for n in cutlass.range_constexpr(4 * self.slices):
            i = n // 2 * 8 + 2 * th.c + n % 2
            if i < live.count:
                source = u[live.place(i), None]
                cute.autovec_copy(
                    cute.local_tile(source, (self.octets,), (row0 // self.octets + th.g,)),
                    cute.local_tile(x, (self.octets,), (n,)),
                )
        return x

    @cute.jit
    def load_keys(self, k, live, tid):
        """Issues the loads of the ring's keys; zeros where there is no entry."""
        chunks = const_expr(self.K // CHUNK)
        x = cute.make_rmem_tensor((self.pieces * CHUNK,), k.element_type)
        x.fill(0)
        for m in cutlass.range_constexpr(self.pieces):
            at = m * self.threads + tid
            if at // chunks < live.count:
                source = k[live.place(at // chunks), None]
                cute.autovec_copy(
                    cute.local_tile(source, (CHUNK,), (at % chunks,)),
                    cute.local_tile(x, (CHUNK,), (m,)),
                )
        return x

    @cute.jit
    def fill_keys(self, x, keys, tid):
        """The ring's keys to shared memory."""
        chunks = const_expr(self.K // CHUNK)
        for m in cutlass.range_constexpr(self.pieces):
            at = m * self.threads + tid
            rx = cute.make_tensor(x.iterator + m * CHUNK, cute.make_layout((CHUNK,)))
            if const_expr(self.ring * chunks % self.threads == 0):
                self.key_stage.store(rx, fr.wide(rx, CHUNK), 0, at // chunks, at % chunks, keys)
            else:
                if at < self.ring * chunks:
                    self.key_stage.store(rx, fr.wide(rx, CHUNK), 0, at // chunks, at % chunks, keys)

    @cute.jit
    def load_decay(self, decay, live, lane):
        """Lane i: the decay of entry i; one where there is none."""
        x = F32(1.0)
        if lane < live.count:
            x = decay[live.place(lane)]
        return x

    def behind(self, decay, lane):
        """Lane i of the first `ring`: the product of the decays behind entry i; and that of all, in every lane."""
        x = decay
        for n in range(self.ring.bit_length() - 1):
            d = 1 << n
            y = fr.at_lane(x, cutlass.min(lane + d, 31))
            x = cutlass.select_(lane + d < self.ring, x * y, x)
        after = fr.at_lane(x, cutlass.min(lane + 1, 31))
        return cutlass.select_(lane + 1 >= self.ring, F32(1.0), after), fr.at_lane(x, 0)

    def operands_of(self, x: "Corrected", terms: int, factors=None):
        """x, or F x, in bf16 terms: of each 16 entries and two octets of rows A's registers of one product, which are B's of two."""
        u = fr.registers(terms * self.slices * self.octets * 4, BF)
        for n in range(2 * self.slices):
            for j in range(self.octets):
                both = fr.registers(2)
                for e in range(2):
                    both[e] = x.u[(2 * n + e) * self.octets + j].to(F32)
                    if factors is not None:
                        both[e] = both[e] * factors[2 * n + e]
                for term in range(terms):
                    at = self.u_place(term, n // 2, j) + n % 2 * 4
                    cute.autovec_copy(fr.split(both), fr.pair(u, at))
        return u

    def factors_of(self, x: "Corrected", th):
        """F of entries 2c and 2c + 1 of each eight."""
        return [fr.at_lane(x.after, n // 2 * 8 + 2 * th.c + n % 2) for n in range(4 * self.slices)]

    def u_place(self, term: int, piece: int, octet: int) -> int:
        """Where an octet's registers begin: their halves along the entries are four elements apart."""
        return ((term * self.slices + piece) * (self.octets // 2) + octet // 2) * 8 + octet % 2 * 2

    def project(self, raw, o, th, x: "Corrected"):
        """P' of the warp's rows: P and G by the same reads of [k, q], then what the ring adds."""
        s, C = self.shape, self.chains
        p = fr.registers(C * s.tiles * self.octets * 4, F32, 0.0)
        sums = fr.registers(s.tiles * self.slices * 8, F32, 0.0)
        bases = [s.place_a(th, a) for a in range(s.fragments)]
        row = th.lane // 16 * 8 + th.lane % 8
        place = row * s.stride + th.lane // 8 % 2 * 8
        for i in range(s.products):
            # else all matrices of the loop are read at its head, into as many registers as the state has
            if i % 2 == 0:
                cute.arch.sync_warp()
            states = [self.state_operands(raw, j, i) for j in range(self.octets)]
            entries = fr.registers(s.terms * self.slices * 8, BF)
            for n in range(s.terms * self.slices):
                fr.read_matrices(x.keys.x, place + 16 * (n * s.stride + i), entries, 8 * n)
            for a in range(s.fragments):
                A = fr.registers(8, BF)
                fr.read_matrices(o.x, bases[a] + 16 * i, A)
                chain = (a if s.fragments > s.tiles else i) % C
                for order in range(self.state_terms):
                    if s.first_term(a) + order > HIGHEST_ORDER:
                        continue
                    for j in range(self.octets):
                        at = ((chain * s.tiles + s.tile(a)) * self.octets + j) * 4
                        fr.mma(fr.accumulator(p, at), fr.operand_a(A), states[j][order])
                for n in range(s.terms * self.slices):
                    for half in range(2):
                        at = ((s.tile(a) * self.slices + n % self.slices) * 2 + half) * 4
                        b = fr.operand_b(entries, 8 * n + 4 * half)
                        fr.mma(fr.accumulator(sums, at), fr.operand_a(A), b)
        # as operands they are twice as many registers
        cute.arch.sync_warp()
        u = self.operands_of(x, self.u_terms)
        g = self.tokens_as_a(sums, self.factors_of(x, th))
        for n in range(s.tiles):
            for j in range(self.octets):
                self.write_projection(p, (g, u), n, j, th, x)

    def tokens_as_a(self, sums, factors):
        """Sums of [k, q] and 16 entries, times F, as the next product's A, whose registers lie as the sums do.

        Packed: the second term in the rows where the tokens' second terms were. Else in registers behind.
        """
        s = self.shape
        terms = 1 if s.packed else 2
        g = fr.registers(s.tiles * self.slices * terms * 8, BF)
        for n in range(s.tiles * self.slices):
            for half in range(2):
                at, to = (2 * n + half) * 4, n * terms * 8 + half * 4
                f = factors[2 * (2 * (n % self.slices) + half) :][:2]
                both = fr.registers(2)
                if s.packed:
                    for e in range(2):
                        both[e] = (sums[at + e] + sums[at + 2 + e]) * f[e]
                    for term in range(2):
                        cute.autovec_copy(fr.split(both), fr.pair(g, to + 2 * term))
                else:
                    for which in range(2):
                        for e in range(2):
                            both[e] = sums[at + 2 * which + e] * f[e]
                        for term in range(2):
                            cute.autovec_copy(fr.split(both), fr.pair(g, to + 8 * term + 2 * which))
        return g

    def write_projection(self, p, ring, n: int, j: int, th, sP: Corrected) -> None:
        """With the ring's part in P."""
        s = self.shape
        at = (n * self.octets + j) * 4
        y = fr.registers(4)
        for e in range(4):
            y[e] = p[at + e]
            if self.chains > 1:
                y[e] = y[e] + p[s.tiles * self.octets * 4 + at + e]
            y[e] = y[e] * sP.total
        self.add_ring(fr.accumulator(y), *ring, n, j)
        for e in range(2):
            row = self.row_of(j, 2 * th.c + e)
            if s.packed:
                sP.p[row, th.g] = y[e] + y[2 + e]
            else:
                sP.p[row, 8 * n + th.g] = y[e]
                sP.p[row, s.N + 8 * n + th.g] = y[2 + e]

    def add_ring(self, acc, g, u, n: int, j: int) -> None:
        """(G F) x of a tile of tokens and an octet of rows; the product of both second terms is below fp32's roundoff."""
        terms = 1 if self.shape.packed else 2
        for piece in range(self.slices):
            for term in range(terms):
                at = ((n * self.slices + piece) * terms + term) * 8
                for u_term in range(min(self.u_terms, 2 - term)):
                    b, place = fr.registers(4, BF), self.u_place(u_term, piece, j)
                    for half in range(2):
                        cute.autovec_copy(fr.pair(u, place + 4 * half), fr.pair(b, 2 * half))
                    fr.mma(acc, fr.operand_a(g, at), fr.operand_b(b))

    @cute.jit
    def keep_u(self, u, o, new, row):
        """A thread's corrections to the ring."""
        for t in cutlass.range_constexpr(self.tokens):
            if t < new.tokens:
                new.u[new.live.place(new.live.count + t), row] = u[t].to(self.u_dtype)

    def fold(self, raw, x: Corrected, th) -> None:
        """S_L, rounded, in place of S0."""
        s = self.shape
        u = self.operands_of(x, U_TERMS, self.factors_of(x, th))
        row = th.lane // 8 % 2 * 8 + th.lane % 8
        place = row * s.stride + th.lane // 16 * 8
        for first in range(0, self.share // 2, 2):
            if first % 4 == 0:
                cute.arch.sync_warp()
            words = fr.registers(s.terms * self.slices * 8, BF)
            for n in range(s.terms * self.slices):
                fr.read_matrices(
                    x.keys.x, place + 16 * n * s.stride + 8 * first, words, 8 * n, transpose=True
                )
            for i in range(2):
                for m in range(self.octets // 2):
                    self.fold_two(raw, words, u, x.total, first + i, i, m)

    def fold_two(self, raw, words, u, total, column: int, i: int, m: int) -> None:
        """Two octets of rows, eight keys."""
        y = fr.registers(4)
        places = [(2 * m + half) * self.share + 2 * column for half in range(2)]
        for half in range(2):
            fr.pair(y, 2 * half).store(fr.wide(fr.pair(raw, places[half]), 2).load() * total)
        acc = fr.accumulator(y)
        for term in range(self.shape.terms):
            for piece in range(self.slices):
                b = fr.operand_b(words, (term * self.slices + piece) * 8 + 4 * i)
                for u_term in range(U_TERMS - term):
                    a = fr.operand_a(u, self.u_place(u_term, piece, 2 * m))
                    fr.mma(acc, a, b)
        for half in range(2):
            fr.pair(raw, places[half]).store(fr.pair(y, 2 * half).load().to(self.state_dtype))

    @cute.jit
    def append_keys(self, loaded, ring_k, live, length: Int32, tid):
        """A block's keys to the ring, as they came."""
        for m in cutlass.range_constexpr(self.stage.pieces):
            which, t, chunk = self.stage.place(m, tid)
            if which == 0 and t < length:
                cute.autovec_copy(
                    cute.local_tile(loaded, (CHUNK,), (m,)),
                    cute.local_tile(ring_k[live.place(live.count + t), None], (CHUNK,), (chunk,)),
                )

    def own_memory(self, smem, warp):
        """A warp's own shared memory, p; warps without rows leave it alone."""
        W, R, P = self.row_warps, self.rows, 2 * self.shape.N + 4
        p = smem.allocate_tensor(F32, cute.make_layout((W, R, P), stride=(R * P, P, 1)), 16)
        return p[cutlass.min(warp, W - 1), None, None]

    @cute.jit
    def run_rows(self, o, x, new, mine, came, values, row0, th):
        """A warp's rows, `rows` at a time: the next ones are on their way while these are worked on."""
        for it in cutlass.range_constexpr(self.passes):
            first = row0 + it * self.rows
            raw = self.turned(came)
            self.project(raw, o, th, x)
            cute.arch.sync_warp()
            these, own = values, x
            if const_expr(it + 1 < self.passes):
                row = first + self.rows
                came = self.load_state(mine.source, row, th)
                x = dataclasses.replace(x, u=self.load_corrections(new.u, new.live, row, th))
                values = self.load_values(mine.v, mine.span, mine.hv, row + th.lane % self.rows)
                cute.arch.sync_warp()
            kept = Appended(cute.domain_offset((0, first), new.u), new.live, new.tokens)
            out = cute.domain_offset((0, first), mine.out)
            self.solve(o, Rows(x.p, kept), these, th, th.lane < self.rows, mine.span, out)
            if mine.folds:
                self.fold(raw, own, th)
                self.store_state(raw, mine.goal, first, th)
            if const_expr(it + 1 < self.passes):
                cute.arch.sync_warp()

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        heads: cute.FastDivmodDivisorV2, slots: Int32, tokens: Int32, ring_rows: Int32,
    ):  # fmt: skip
        th = fr.Thread.here()
        vt, hv, n = self.place()
        hq, within = divmod(hv, heads)
        slot, write_slot = self.slots_of(n, read_index, write_index, None, None, None)
        base = ring_base[n]
        count = ring_count[n]
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        span = Span(n, Int32(0), tokens, False)
        v0 = vt * self.tile_v
        row0 = v0 + cutlass.min(th.warp, self.row_warps - 1) * (self.rows * self.passes)
        row = th.lane % self.rows

        # what does not hang on the slot is loaded while the slot's index is on its way
        A = F32(0.0) if const_expr(A_log is None) else A_log[hv].to(F32)
        bias = None if const_expr(dt_bias is None) else dt_bias[hv].to(F32)
        loaded = self.stage.load(k, q, span, hq, th.tid)
        ga, gb = self.load_gates(a, b, span, hv, th.lane)
        values = self.load_values(v, span, hv, row0 + row)
        cute.arch.sync_warp()

        live_slot, writes = self.named(slot, write_slot, slots, null_index)
        if live_slot:
            source = state[Int64(slot), hv, None, None]
            came = self.load_state(source, row0, th)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            live = Live(
                cutlass.min(cutlass.max(base, 0), ring_rows - 1),
                cutlass.min(cutlass.max(count, 0), cutlass.min(ring_rows, self.ring)),
                ring_rows,
            )
            k_rows = ring_k[Int64(slot), Int64(hq), None, None]
            u_rows = ring_u[Int64(slot), Int64(hv), None, None]
            decays = ring_decay[Int64(slot), Int64(hv), None]
            old_decay = self.load_decay(decays, live, th.lane)
            old_keys = self.load_keys(k_rows, live, th.tid)
            old_u = self.load_corrections(u_rows, live, row0, th)
            cute.arch.sync_warp()
            folds = live.count >= cutlass.min(flush_min, self.ring + 1 - tokens)
            appended = cutlass.select_(append != 0, tokens, Int32(0))

            smem = SmemAllocator()
            o = allocate(smem, self.shape, False, False, k.element_type)
            keys = KeyRows(
                smem.allocate_tensor(
                    BF,
                    matrix(self.shape.terms * self.ring, self.shape.stride, self.shape.stride),
                    16,
                )
            )
            p = self.own_memory(smem, th.warp)
            beta = cutlass.select_(th.lane < tokens, self.beta_of(gb, beta_scale), F32(0.0))
            decay = gates.decay(
                self.gate, ga, A, bias, softplus_beta, softplus_threshold, lower_bound
            )
            decay = cutlass.select_(th.lane < tokens, decay, F32(1.0))
            self.stage.fill(loaded, o, th.tid)
            if vt == 0:
                if within == 0:
                    self.append_keys(loaded, k_rows, live, appended, th.tid)
                if th.tid < appended:
                    decays[live.place(live.count + th.tid)] = decay
            cute.arch.sync_threads()
            # while the ring and the state are on their way
            self.stage.combine(o, th, decay, beta, scale, use_qk_l2norm)
            self.fill_keys(old_keys, keys, th.tid)
            cute.arch.sync_threads()
            after, total = self.behind(old_decay, th.lane)
            x = Corrected(p, keys, old_u, after, total)
            new = Appended(u_rows, live, cutlass.select_(th.lane < self.rows, appended, Int32(0)))
            goal = state[Int64(write_slot), hv, None, None]
            out = output[n, None, hv, None]
            mine = Mine(source, goal, folds and writes, v, hv, span, out)
            if const_expr(32 * self.row_warps == self.threads):
                self.run_rows(o, x, new, mine, came, values, row0, th)
            else:
                if th.warp < self.row_warps:
                    self.run_rows(o, x, new, mine, came, values, row0, th)
        else:
            self.zero_rows(output, n, Int32(0), tokens, hv, v0, th.tid)


def fakes(facts: dict, tensors: list) -> list:
    """Stand-ins for the ring's tensors; those of a decode kernel say the sizes."""
    state, k, v, read_index = tensors[0], tensors[2], tensors[3], tensors[8]
    slots, rows = state.shape[0], cute.sym_int(symbol="ring_rows")
    stored = decode.DTYPES[facts["ring_dtype"]]

    def kept(dtype, heads, *width):
        # 64-bit strides, as the state's; a row of 16 bytes and more may be loaded at once
        unit = 16 // (dtype.width // 8) if width else 1
        stride = (cute.sym_int64(divisibility=unit), cute.sym_int64(divisibility=unit), *width, 1)
        return make_fake_tensor(
            dtype, (slots, heads, rows, *width), stride, assumed_align=16 if width else 4
        )

    def index():
        return make_fake_tensor(Int32, read_index.shape, (cute.sym_int(),), assumed_align=4)

    return [
        kept(k.element_type, k.shape[2], facts["K"]),
        kept(stored, v.shape[2], facts["V"]),
        kept(F32, v.shape[2]),
        index(),
        index(),
    ]


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    ring = Ring(facts, knobs)
    ring.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    tensors = decode.fakes(facts)
    scalars = [F32(1.0)] * 5 + [Int32(-1), Int32(1)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        ring.gated_delta_rule_ring, *tensors, *scalars, *fakes(facts, tensors), Int32(1), Int32(1), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
