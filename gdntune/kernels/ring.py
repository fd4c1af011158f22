"""Gated delta rule decode of drafts behind a ring of corrections: the state is read once, and written where the ring is folded in.

A ring keeps of each accepted token that the state lacks its key k_i as it came, x_i = u_i / |k_i| and its decay. With L of them, F_i the
product of the decays behind entry i and R that of all,

    S_L = R S0 + sum_i F_i x_i k_i^T                    the state that the call starts from; never formed, unless it is folded
    P'  = S_L [k, q]^T = R S0 [k, q]^T + x (F G)^T      G = [k, q] k_ring^T
    y_t = beta_t / |k_t| (v_t - D_t P'_k[t] / |k_t|)    what a token's correction would be, were there none in this call
    x   = W y,   o = D P'_q + C W y                     W = (I + diag(beta / |k|^2) tril(k k^T, -1))^-1,  C = tril(q k^T), with decays

All rows of V are multiplied by the same F G, W and C W, which a block works out while the state is on its way. What is left behind the
state is a chain of products on tensor cores, rows of V by tokens: sums of one lie in registers as the next one's operand does, so that
nothing of a row meets shared memory.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates, rounding
from gdntune.kernels import fragments as fr
from gdntune.kernels.ring_call import Live, compiled
from gdntune.kernels.wy_block import HIGHEST_ORDER, Span, WYBlock
from gdntune.kernels.wy_block_gdn import CHUNK, RowStage
from gdntune.kernels.wy_operands import Shape, allocate, matrix

F32, BF = Float32, BFloat16
# of bf16, that hold a correction as it is kept
TERMS_KEPT = {"bf16": 1, "fp32": 2}
# and what is worked out in fp32; of two such factors the product of both second terms is below fp32's roundoff
TERMS = 2
# elements of a matrix of eight rows, an operand's unit
MATRIX = 64


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
class Corrected:
    """What the state lacks of the ring: its keys, a thread's corrections as they came, F of a lane's entry, and R."""

    keys: Any
    u: Any
    after: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Held:
    """Registers that have `width` elements of each row of a thread, of its share from `first` on."""

    x: Any
    first: int
    width: int

    def at(self, octet: int, element: int) -> int:
        """Where an element of a row's share is."""
        return octet * self.width + element - self.first


@dataclasses.dataclass(frozen=True)
class Mine:
    """What a warp's rows are read from and written to: a head's states, whether it is folded, corrections u [rows, V] with their window
    and how many are kept, v, and the output [T, V] with how many tokens it has.
    """

    source: Any
    goal: Any
    folds: Any
    u: Any
    live: Any
    appended: Any
    v: Any
    hv: Any
    span: Any
    out: Any
    tokens: Any
    chance: Any


@dataclasses.dataclass(frozen=True)
class Chance:
    """To round a state at random: the seed, and what of a counter is the block's, its head and slot."""

    seed: Any
    head: Any
    slot: Any


class Ring(WYBlock):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, {**knobs, "pdl": "none", "matrices": False})
        self.shared, self.late = knobs["shared"], knobs["late"]
        self.ring, self.u_dtype = facts["ring"], decode.DTYPES[facts["ring_dtype"]]
        self.u_terms = TERMS_KEPT[facts["ring_dtype"]]
        # of F x where it is folded: with two, 32 entries in an fp32 state came to 1.09 of the tolerance
        self.fold_terms = TERMS + (self.state_dtype is not BF)
        self.at_random = facts["ring_rounding"] == "stochastic"
        s = self.shape
        self.keys = KeyShape(
            s.K, s.tokens, s.vec, s.terms, s.key_terms, s.threads, entries=self.ring
        )
        self.key_stage = RowStage(self, self.keys)
        # of 16 entries, which one product adds up
        self.slices = self.ring // 16
        self.pieces = -(-self.ring * (s.K // CHUNK) // s.threads)
        # of 16 rows of V; of eight columns: a tile's k and its q, or both where tokens are few
        self.row_tiles, self.token_columns = self.octets // 2, 1 if s.packed else 2 * s.tiles
        # two accumulators where a warp's sums alone do not fill mma's latency
        self.chains = 2 if self.row_tiles * self.token_columns < 4 else 1
        # matrices of F G, then of W and C W
        self.ring_matrices = self.token_columns * self.slices * TERMS * 2
        self.matrices = self.ring_matrices + self.token_columns * s.tiles * TERMS

    def row_of(self, octet, g):
        """Rows side by side: a thread's corrections of an entry are one load."""
        return self.octets * g + octet

    def ring_matrix(self, column, half, term: int):
        """Where F G of a column of tokens and the entries 8 half to 8 half + 7 is."""
        return ((column * self.slices + half // 2) * TERMS + term) * 2 + half % 2

    def solution_matrix(self, column, tile, term: int):
        """Where W or C W of a column of tokens and the corrections of a tile is."""
        return self.ring_matrices + (column * self.shape.tiles + tile) * TERMS + term

    @cute.jit
    def gated_delta_rule_ring(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, stream: CUstream,
    ):  # fmt: skip
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(ring_k, 3, None), self.view(ring_u, 3, None), self.view(ring_decay, 3, None),
            self.view(ring_base, 1), self.view(ring_count, 1), flush_min, append,
            heads, state.shape[0], q.shape[1], ring_u.shape[2], ring_seed,
        ).launch(
            grid=(self.V // self.tile_v, HV, output.shape[0]), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident or self.shared else None,
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

    @cute.jit
    def ask_state(self, tile, row0, th, own):
        """Issues the loads of a warp's rows: to registers, or to `own`, a thread's shared memory [chunks, vec]; returns which."""
        x = own
        if const_expr(self.shared):
            mode = cpasync.LoadCacheMode.GLOBAL
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=mode), self.state_dtype, num_bits_per_copy=128
            )
            for source, at, n in self.runs(tile, row0, th):
                cute.copy_atom_call(atom, source, own[at // n, None])
            cute.arch.cp_async_commit_group()
        else:
            x = self.load_state(tile, row0, th)
        return x

    def part(self, state, element: int, last: Held | None) -> Held:
        """What has an element of each row's share: all of it, or the run that it begins."""
        if not self.shared:
            return last or Held(state, 0, self.share)
        vec = self.shape.vec
        if element % vec:
            return last
        x = fr.registers(self.octets * vec, self.state_dtype)
        for j in range(self.octets):
            run = cute.make_tensor(x.iterator + j * vec, cute.make_layout((vec,)))
            cute.autovec_copy(state[(j * self.share + element) // vec, None], run)
        return Held(x, element, vec)

    def state_as_a(self, held: Held, m: int, x: int):
        """The state's part in product x of 16 rows as operands, a term each."""
        at, next_octet = held.at(2 * m, 4 * x), held.width
        if self.state_dtype is BF:
            return [fr.view(held.x, at, ((2, 2, 2),), ((1, next_octet, 2),))]
        words = [
            fr.wide(fr.pair(held.x, at + n % 2 * next_octet + n // 2 * 2), 2) for n in range(4)
        ]
        found = []
        for _ in range(self.state_terms):
            a = fr.registers(8, BF)
            for n in range(4):
                cute.autovec_copy(fr.split(words[n]), fr.pair(a, 2 * n))
            found.append(fr.operand_a(a))
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
                held = self.part(state, 4 * x, held)
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

    @cute.jit
    def correlate(self, o, keys, after, matrices, th):
        """F G to `matrices`: a warp has eight entries at a time, and all tokens."""
        halves = const_expr(2 * self.slices)
        for at in cutlass.range_constexpr(-(-halves // self.shape.warps)):
            half = at * self.shape.warps + th.warp
            if half < halves:
                self.correlate_half(o, keys, after, matrices, half, th)

    def correlate_half(self, o, keys, after, matrices, half, th) -> None:
        """F G of the entries 8 half to 8 half + 7."""
        s = self.shape
        sums = fr.registers(s.tiles * 2 * 4, F32, 0.0)
        bases = [s.place_a(th, a) for a in range(s.fragments)]
        place = (8 * half + th.lane % 8) * s.stride + th.lane // 8 * 8
        for first in range(0, s.products, 2):
            entries = [fr.registers(8, BF) for _ in range(s.terms)]
            for term in range(s.terms):
                fr.read_matrices(
                    keys.x, place + term * self.ring * s.stride + 16 * first, entries[term]
                )
            for i in range(2):
                for a in range(s.fragments):
                    A = fr.registers(8, BF)
                    fr.read_matrices(o.x, bases[a] + 16 * (first + i), A)
                    acc = fr.accumulator(sums, (s.tile(a) * 2 + i) * 4)
                    for term in range(s.terms):
                        fr.mma(acc, fr.operand_a(A), fr.operand_b(entries[term], 4 * i))
        factors = [fr.at_lane(after, 8 * half + 2 * th.c + e) for e in range(2)]
        for tile in range(s.tiles):
            y = [sums[8 * tile + e] + sums[8 * tile + 4 + e] for e in range(4)]
            if s.packed:
                # rows g + 8 are the second term's, or zeros
                y = [y[e] + y[2 + e] for e in range(2)]
            for which in range(len(y) // 2):
                both = fr.registers(2)
                for e in range(2):
                    both[e] = y[2 * which + e] * factors[e]
                for term in range(TERMS):
                    to = self.ring_matrix(2 * tile + which, half, term) * (MATRIX // 2) + th.lane
                    cute.autovec_copy(fr.split(both), cute.local_tile(matrices, (2,), (to,)))

    @cute.jit
    def solve_all(self, o, matrices, th):
        """W - I and C W to `matrices`, by the last warp: a lane has a column, what a correction of 1 at a token does to all others."""
        N, width = const_expr(self.shape.N), const_expr(max(self.shape.N, 8))
        if th.warp == self.shape.warps - 1:
            j = th.lane % width
            cute.arch.sync_warp()
            w = cute.make_rmem_tensor((N,), F32)
            line = cute.make_rmem_tensor((N,), F32)
            factors = cute.make_rmem_tensor((4,), F32)
            for t in cutlass.range_constexpr(self.tokens):
                cute.autovec_copy(o.factors[t, None], factors)
                x = F32(0.0)
                cute.autovec_copy(o.gram[0, t, None], line)
                for i in cutlass.range_constexpr(t):
                    x = x + line[i] * w[i]
                x = -x * factors[1]
                w[t] = x + cutlass.select_(j == t, F32(1.0), F32(0.0))
                y = F32(0.0)
                cute.autovec_copy(o.gram[1, t, None], line)
                for i in cutlass.range_constexpr(t + 1):
                    y = y + line[i] * w[i]
                if th.lane < width:
                    self.keep_solution(x, y * factors[2], matrices, t, j)

    def keep_solution(self, x, y, matrices, t: int, j) -> None:
        """W - I and C W of token t and column j."""
        both = fr.registers(2)
        both[0], both[1] = x, y
        for term in range(TERMS):
            word = fr.split(both)
            for which in range(2):
                column, row = (
                    (0, 4 * which + t) if self.shape.packed else (t // 8 * 2 + which, t % 8)
                )
                at = self.solution_matrix(column, j // 8, term) * MATRIX + 8 * row + j % 8
                matrices[at] = word[which]

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

    def read_all(self, matrices, first: int, count: int, th):
        """`count` matrices as B's registers, two of bf16 each."""
        x = fr.registers(2 * count, BF)
        for at in range(0, count, 4):
            n = min(4, count - at)
            # lanes behind those that name a row are not looked at
            place = (first + at) * MATRIX + 8 * (th.lane % (8 * n))
            fr.read_matrices(matrices, place, x, 2 * at, n)
        return x

    def answer(self, p, o, matrices, x: Corrected, values, th):
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
            ring = self.read_all(
                matrices, self.ring_matrix(column, 0, 0), self.slices * TERMS * 2, th
            )
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
            solution = self.read_all(matrices, first, s.tiles * TERMS, th)
            for tile in range(column // 2 + 1):
                for m in range(self.row_tiles):
                    acc = self.sums_at(p, column, m)
                    for term in range(TERMS):
                        b = fr.operand_b(solution, 2 * (tile * TERMS + term), 8)
                        for order in range(TERMS - term):
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
        for _ in range(TERMS):
            a = fr.registers(4, BF)
            for half in range(2):
                cute.autovec_copy(fr.split(both[half]), fr.pair(a, 2 * half))
            found.append(a)
        return found

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

    def fold(self, state, x: Corrected, goal, chance, row0, th) -> None:
        """S_L, rounded, to `goal`: rows whose keys lie side by side as soon as 16 bytes of them are there."""
        s = self.shape
        u = self.operands_of(x, self.fold_terms, self.factors_of(x, th))
        row = th.lane // 8 % 2 * 8 + th.lane % 8
        place, held = row * s.stride + th.lane // 16 * 8, None
        for first in range(0, self.share // 2, 2):
            cute.arch.sync_warp()
            held = self.part(state, 2 * first, held)
            words = fr.registers(s.terms * self.slices * 8, BF)
            for n in range(s.terms * self.slices):
                fr.read_matrices(
                    x.keys.x, place + 16 * n * s.stride + 8 * first, words, 8 * n, transpose=True
                )
            drawn = [
                self.draw(chance, row0, first * self.octets // 4 + m, th)
                for m in range(self.row_tiles)
            ]
            for i in range(2):
                for m in range(self.row_tiles):
                    self.fold_two(held, words, u, x.total, first + i, i, m, drawn[m])
            if self.k_last:
                self.store_runs(held, goal, row0, 2 * first, 2 * first + 4, th)
        if not self.k_last:
            self.store_state(state, goal, row0, th)

    def store_runs(self, held: Held, goal, row0, first: int, end: int, th) -> None:
        """The runs of a thread's rows that the elements first to end - 1 complete."""
        for to, at, n in self.runs(goal, row0, th):
            octet, element = divmod(at, self.share)
            if first < element + n <= end:
                place = held.x.iterator + held.at(octet, element)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout((n,))), to)

    def draw(self, chance, row0, n: int, th):
        """Words for eight of a thread's elements, the n-th of its rows at row0; None where states are rounded to nearest."""
        if not self.at_random:
            return None
        counter = (row0 * 32 + th.lane) * (self.octets * self.share // rounding.EACH) + n
        return rounding.philox(counter, chance.head, chance.slot, chance.seed)

    def fold_two(self, held: Held, words, u, total, column: int, i: int, m: int, drawn) -> None:
        """Two octets of rows, eight keys, in place."""
        y = fr.registers(4)
        pairs = [fr.pair(held.x, held.at(2 * m + half, 2 * column)) for half in range(2)]
        for half in range(2):
            fr.pair(y, 2 * half).store(fr.wide(pairs[half], 2).load() * total)
        acc = fr.accumulator(y)
        for term in range(self.shape.terms):
            for piece in range(self.slices):
                b = fr.operand_b(words, (term * self.slices + piece) * 8 + 4 * i)
                for u_term in range(self.fold_terms - term):
                    a = fr.operand_a(u, self.u_place(u_term, piece, 2 * m))
                    fr.mma(acc, a, b)
        if drawn is not None:
            rounding.at_random(y, drawn[2 * i : 2 * i + 2], self.state_dtype)
        for half in range(2):
            pairs[half].store(fr.pair(y, 2 * half).load().to(self.state_dtype))

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

    def own_memory(self, smem, th):
        """A thread's shared memory for its part of the state, 16 bytes of each thread's side by side."""
        if not self.shared:
            return None
        vec, threads = self.shape.vec, self.threads
        layout = cute.make_layout(
            (threads, self.octets * self.share // vec, vec), stride=(vec, threads * vec, 1)
        )
        return smem.allocate_tensor(self.state_dtype, layout, 16)[th.tid, None, None]

    @cute.jit
    def run_rows(self, o, matrices, x, mine, came, values, row0, th):
        """A warp's rows, `rows` at a time: the next ones are on their way while these are worked on."""
        for it in cutlass.range_constexpr(self.passes):
            first = row0 + it * self.rows
            raw = came
            if const_expr(self.shared):
                cute.arch.cp_async_wait_group(0)
            else:
                raw = self.turned(came)
            p = self.project(raw, o, th)
            if const_expr(it == 0):
                # F G, W and C W are there
                cute.arch.sync_threads()
            these, own = values, x
            if const_expr(it + 1 < self.passes):
                row = first + self.rows
                came = self.load_state(mine.source, row, th)
                x = dataclasses.replace(x, u=self.load_corrections(mine.u, mine.live, row, th))
                values = self.load_tokens(mine.v, mine.span, mine.hv, row, th)
                cute.arch.sync_warp()
            self.answer(p, o, matrices, own, these, th)
            self.store_rows(p, mine, first, th)
            if mine.folds:
                self.fold(raw, own, mine.goal, mine.chance, first, th)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        heads: cute.FastDivmodDivisorV2, slots: Int32, tokens: Int32, ring_rows: Int32, ring_seed,
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

        # what does not hang on the slot is loaded while the slot's index is on its way
        A = F32(0.0) if const_expr(A_log is None) else A_log[hv].to(F32)
        bias = None if const_expr(dt_bias is None) else dt_bias[hv].to(F32)
        loaded = self.stage.load(k, q, span, hq, th.tid)
        ga, gb = self.load_gates(a, b, span, hv, th.lane)
        cute.arch.sync_warp()

        live_slot, writes = self.named(slot, write_slot, slots, null_index)
        if live_slot:
            live = Live(
                cutlass.min(cutlass.max(base, 0), ring_rows - 1),
                cutlass.min(cutlass.max(count, 0), cutlass.min(ring_rows, self.ring)),
                ring_rows,
            )
            k_rows = ring_k[Int64(slot), Int64(hq), None, None]
            u_rows = ring_u[Int64(slot), Int64(hv), None, None]
            decays = ring_decay[Int64(slot), Int64(hv), None]
            # ahead of the state, which is more: what is made of the ring is to be ready when the state comes
            old_decay = self.load_decay(decays, live, th.lane)
            old_keys = self.load_keys(k_rows, live, th.tid)
            cute.arch.sync_warp()
            smem = SmemAllocator()
            source = state[Int64(slot), hv, None, None]
            own = self.own_memory(smem, th)
            came = self.ask_state(source, row0, th, own)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            o = allocate(smem, self.shape, False, False, k.element_type)
            keys = KeyRows(
                smem.allocate_tensor(
                    BF,
                    matrix(self.shape.terms * self.ring, self.shape.stride, self.shape.stride),
                    16,
                )
            )
            matrices = smem.allocate_tensor(BF, cute.make_layout((self.matrices * MATRIX,)), 16)
            # Late: always so, which no compiler knows. It would else work out norms and gates, and wait for k and q, ahead of the state.
            going = cutlass.Boolean(True)
            if const_expr(self.late):
                going = tokens > 0
            if going:
                folds = live.count >= cutlass.min(flush_min, self.ring + 1 - tokens)
                appended = cutlass.select_(append != 0, tokens, Int32(0))
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
                # in the registers that k and q leave
                old_u = self.load_corrections(u_rows, live, row0, th)
                values = self.load_tokens(v, span, hv, row0, th)
                # by the last warp, while the ring is on its way
                self.stage.combine(o, th, decay, beta, scale, use_qk_l2norm)
                self.solve_all(o, matrices, th)
                self.fill_keys(old_keys, keys, th.tid)
                cute.arch.sync_threads()
                after, total = self.behind(old_decay, th.lane)
                self.correlate(o, keys, after, matrices, th)
                # warps without rows of their own go along with the last one's, and write nothing
                writing = writes and folds
                shown = tokens
                if const_expr(32 * self.row_warps != self.threads):
                    owner = th.warp < self.row_warps
                    writing = writing and owner
                    shown = cutlass.select_(owner, tokens, Int32(0))
                    appended = cutlass.select_(owner, appended, Int32(0))
                goal = state[Int64(write_slot), hv, None, None]
                out = output[n, None, hv, None]
                chance = Chance(ring_seed, hv, write_slot)
                mine = Mine(
                    source, goal, writing, u_rows, live, appended, v, hv, span, out, shown, chance
                )
                x = Corrected(keys, old_u, after, total)
                self.run_rows(o, matrices, x, mine, came, values, row0, th)
        else:
            self.zero_rows(output, n, Int32(0), tokens, hv, v0, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return compiled(Ring(facts, knobs), facts, options, prefix)
