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

from gdntune.kernels import decode, gates, l2, rounding
from gdntune.kernels import fragments as fr
from gdntune.kernels.ring_call import Live, compiled
from gdntune.kernels.wy_block import HIGHEST_ORDER, Span, WYBlock
from gdntune.kernels.wy_block_gdn import CHUNK
from gdntune.kernels.wy_operands import allocate, matrix

F32, BF = Float32, BFloat16
# of bf16, that hold a correction as it is kept
TERMS_KEPT = {"bf16": 1, "fp32": 2}
# and what is worked out in fp32; of two such factors the product of both second terms is below fp32's roundoff
TERMS = 2
# of a token's own correction and of W and C W: with two, an output was off by 1.08 of the tolerance on an H200
OWN_TERMS = 3
# elements of a matrix of eight rows, an operand's unit
MATRIX = 64
# bytes that L2 fetches at once
LINE = 128


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
        self.shared, self.late, self.ahead = knobs["shared"], knobs["late"], knobs["prefetch"]
        self.ring, self.u_dtype = facts["ring"], decode.DTYPES[facts["ring_dtype"]]
        self.u_terms = TERMS_KEPT[facts["ring_dtype"]]
        # of F x where it is folded: with two, 32 entries in an fp32 state came to 1.09 of the tolerance
        self.fold_terms = TERMS + (self.state_dtype is not BF)
        self.at_random = facts["ring_rounding"] == "stochastic"
        s = self.shape
        # of 16 entries, which one product adds up
        self.slices = self.ring // 16
        # eight entries that a warp has and products of its part of K; keys of a load of them
        halves = 2 * self.slices
        self.own_halves, self.key_parts = max(1, halves // s.warps), max(1, s.warps // halves)
        self.steps = s.products // self.key_parts
        self.run = 8 if s.vec == 8 and self.steps % 2 == 0 else 4
        # of 16 rows of V; of eight columns: a tile's k and its q, or both where tokens are few
        self.row_tiles, self.token_columns = self.octets // 2, 1 if s.packed else 2 * s.tiles
        # two accumulators where a warp's sums alone do not fill mma's latency
        self.chains = 2 if self.row_tiles * self.token_columns < 4 else 1
        # of W and C W
        # and one that is read beside the last column's three
        self.matrices = self.token_columns * s.tiles * OWN_TERMS + 1

    def row_of(self, octet, g):
        """Rows side by side: a thread's corrections of an entry are one load."""
        return self.octets * g + octet

    def solution_matrix(self, column, tile, term: int):
        """Where W or C W of a column of tokens and the corrections of a tile is."""
        return (column * self.shape.tiles + tile) * OWN_TERMS + term

    @cute.jit
    def gated_delta_rule_ring(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, stream: CUstream,
    ):  # fmt: skip
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        tiles = self.V // self.tile_v
        later = None
        if const_expr(self.ahead > 0):
            later = cutlass.max(self.ahead // (HV * tiles), 1)
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(ring_k, 3, None), self.view(ring_u, 3, None), self.view(ring_decay, 3, None),
            self.view(ring_base, 1), self.view(ring_count, 1), flush_min, append,
            heads, state.shape[0], q.shape[1], ring_u.shape[2], ring_seed, later,
        ).launch(
            grid=(tiles, HV, output.shape[0]), block=(self.threads, 1, 1), stream=stream,
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

    def half_of(self, th, i: int):
        """The i-th eight entries of a warp's."""
        return i * self.shape.warps + th.warp % (2 * self.slices)

    def step_of(self, th, step: int):
        """A product of the warp's part of K, among all."""
        return th.warp // (2 * self.slices) * self.steps + step

    @cute.jit
    def load_keys(self, k, live, th):
        """Issues the loads of a warp's part of the ring's keys, as B has them: of each eight entries the steps' words side by side."""
        x = cute.make_rmem_tensor((self.own_halves * self.steps * 4,), k.element_type)
        x.fill(0)
        for n in cutlass.range_constexpr(self.own_halves):
            i = 8 * self.half_of(th, n) + th.g
            if i < live.count:
                row = k[live.place(i), None]
                for step in cutlass.range_constexpr(0, self.steps, self.run // 4):
                    at = self.step_of(th, step)
                    # in units of a load
                    if const_expr(self.run < self.shape.vec):
                        at = (4 * (at // 2) + th.c) * 2 + at % 2
                    else:
                        at = 4 * (at // (self.run // 4)) + th.c
                    to = cute.local_tile(x, (self.run,), ((n * self.steps + step) * 4 // self.run,))
                    cute.autovec_copy(cute.local_tile(row, (self.run,), (at,)), to)
        return x

    def key_words(self, x):
        """The same in bf16, a term each."""
        if self.shape.terms == 1:
            return [x]
        count = self.own_halves * self.steps * 4
        found = [fr.registers(count, BF) for _ in range(self.shape.terms)]
        for at in range(0, count, 2):
            both = fr.wide(fr.pair(x, at), 2)
            for term in found:
                cute.autovec_copy(fr.split(both), fr.pair(term, at))
        return found

    def correlate(self, o, words, parts, th) -> None:
        """A warp's part of G to `parts` [key_parts, halves, pieces, 32, .]: sums over its part of K."""
        s = self.shape
        sums = fr.registers(self.own_halves * s.tiles * 4, F32, 0.0)
        for step in range(self.steps):
            for a in range(s.fragments):
                A = fr.registers(8, BF)
                fr.read_matrices(o.x, s.place_a(th, a) + 16 * self.step_of(th, step), A)
                for n in range(self.own_halves):
                    acc = fr.accumulator(sums, (n * s.tiles + s.tile(a)) * 4)
                    for term in words:
                        b = fr.operand_b(term, (n * self.steps + step) * 4)
                        fr.mma(acc, fr.operand_a(A), b)
        part = th.warp // (2 * self.slices)
        for n in range(self.own_halves):
            for tile in range(s.tiles):
                own = cute.make_tensor(
                    sums.iterator + (n * s.tiles + tile) * 4, cute.make_layout((4,))
                )
                if s.packed:
                    # rows g + 8 are the second term's, or zeros
                    both = fr.registers(2)
                    for e in range(2):
                        both[e] = own[e] + own[2 + e]
                    own = both
                cute.autovec_copy(own, parts[part, self.half_of(th, n), tile, th.lane, None])

    def parts_layout(self):
        """Of the warps' parts of G."""
        s = self.shape
        sizes = (self.key_parts, 2 * self.slices, s.tiles, 32, 2 if s.packed else 4)
        return cute.make_ordered_layout(sizes, (4, 3, 2, 1, 0))

    @cute.jit
    def keep_keys(self, words: cutlass.Constexpr, keys, th):
        """A warp's part of the ring's keys to shared memory, for a fold."""
        for term in cutlass.range_constexpr(self.shape.terms):
            for n in cutlass.range_constexpr(self.own_halves):
                row = keys[term * self.ring + 8 * self.half_of(th, n) + th.g, None]
                for i in cutlass.range_constexpr(2 * self.steps):
                    word = fr.pair(words[term], (n * self.steps * 2 + i) * 2)
                    at = 4 * (2 * self.step_of(th, 0) + i) + th.c
                    cute.autovec_copy(word, cute.local_tile(row, (2,), (at,)))

    def correlations(self, parts, after, th):
        """F G as B's registers of each column of tokens, of what the warps added up."""
        s = self.shape
        found = [fr.registers(2 * self.slices * TERMS * 2, BF) for _ in range(self.token_columns)]
        for half in range(2 * self.slices):
            factors = [fr.at_lane(after, 8 * half + 2 * th.c + e) for e in range(2)]
            for tile in range(s.tiles):
                sums = fr.registers(2 if s.packed else 4)
                cute.autovec_copy(parts[0, half, tile, th.lane, None], sums)
                for part in range(1, self.key_parts):
                    more = fr.registers(2 if s.packed else 4)
                    cute.autovec_copy(parts[part, half, tile, th.lane, None], more)
                    sums.store(sums.load() + more.load())
                for which in range(1 if s.packed else 2):
                    both = fr.registers(2)
                    for e in range(2):
                        both[e] = sums[2 * which + e] * factors[e]
                    for term in range(TERMS):
                        to = ((half // 2 * TERMS + term) * 2 + half % 2) * 2
                        cute.autovec_copy(fr.split(both), fr.pair(found[2 * tile + which], to))
        return found

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
        """Issues the loads of a warp's rows: to registers, or to `own`, the warp's shared memory [rows * chunks, vec]; returns which.

        Shared memory is not a thread's own: a copy then has whole lines of 128 bytes, where loads to registers have halves.
        """
        x = own
        if const_expr(self.shared):
            mode = cpasync.LoadCacheMode.GLOBAL
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=mode), self.state_dtype, num_bits_per_copy=128
            )
            chunks = const_expr(self.K // self.shape.vec)
            for i in cutlass.range_constexpr(self.rows * chunks // 32):
                row, chunk = (32 * i + th.lane) // chunks, (32 * i + th.lane) % chunks
                source = cute.local_tile(tile[row0 + row, None], (self.shape.vec,), (chunk,))
                cute.copy_atom_call(atom, source, own[self.chunk_place(row, chunk), None])
            cute.arch.cp_async_commit_group()
        else:
            x = self.load_state(tile, row0, th)
        return x

    def chunk_place(self, row, chunk):
        """Where 16 bytes of a row are: lanes of neighbouring g, which read them together, meet other banks."""
        return row * (self.K // self.shape.vec) + (chunk ^ (row // self.octets % 2 * 4))

    def part(self, state, element: int, last: Held | None, th) -> Held:
        """What has an element of each row's share: all of it, or the run that it begins."""
        if not self.shared:
            return last or Held(state, 0, self.share)
        vec = self.shape.vec
        if element % vec:
            return last
        x = fr.registers(self.octets * vec, self.state_dtype)
        for j in range(self.octets):
            run = cute.make_tensor(x.iterator + j * vec, cute.make_layout((vec,)))
            at = self.chunk_place(self.row_of(j, th.g), element // vec * 4 + th.c)
            cute.autovec_copy(state[at, None], run)
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

    @cute.jit
    def prepare(self, o, matrices, th, decay, beta, scale: Float32, use_qk_l2norm: Int32):
        """By the last warp, with token t's decay and beta in lane t: factors, Gram matrices, then W - I and C W to `matrices`. The other
        warps wait for it, so that it has no branch: mma's latency hides the factors.
        """
        if th.warp == self.shape.warps - 1:
            N = const_expr(self.shape.N)
            upto = decay
            for i in cutlass.range_constexpr(N.bit_length() - 1):
                x = fr.at_lane(upto, cutlass.max(th.lane - (1 << i), 0))
                upto = cutlass.select_(th.lane >= (1 << i), upto * x, upto)
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
        x = fr.registers(2 * (-(-count // 4) * 4), BF)
        for at in range(0, count, 4):
            # three are read as four
            n = min(4, count - at) if count - at != 3 else 4
            # lanes behind those that name a row are not looked at
            place = (first + at) * MATRIX + 8 * (th.lane % (8 * n))
            fr.read_matrices(matrices, place, x, 2 * at, n)
        return x

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
            held = self.part(state, 2 * first, held, th)
            words = fr.registers(s.terms * self.slices * 8, BF)
            for n in range(s.terms * self.slices):
                fr.read_matrices(
                    x.keys, place + 16 * n * s.stride + 8 * first, words, 8 * n, transpose=True
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

    def window(self, base, count, ring_rows) -> Live:
        """A request's window, clamped to what a ring has."""
        return Live(
            cutlass.min(cutlass.max(base, 0), ring_rows - 1),
            cutlass.min(cutlass.max(count, 0), cutlass.min(ring_rows, self.ring)),
            ring_rows,
        )

    @cute.jit
    def fetch_later(self, ring, window, inputs, n, hq, hv, first, tokens, lane):
        """Has L2 fetch what a later request's block will load beside its state. ring: its u, keys and decays; inputs: v, k, q and gates of
        all requests. What the heads of a group share, its first one asks for; rows behind a ring's end are left to the block itself.

        With the state in it too, which comes late enough by itself, this loses what it wins: L2 then passes those bytes twice.
        """
        rows = cutlass.min(window.count, window.rows - window.base)
        at, row = Int64(0), Int32(0)
        for which, x in enumerate(ring[:2]):
            width = const_expr(x.shape[1] * x.element_type.width // 8)
            place = x.iterator.toint() + Int64(window.base * width)
            at = cutlass.select_(lane == which, place, at)
            row = cutlass.select_(lane == which, Int32(width), row)
        if rows > 0 and (lane == 0 or (lane == 1 and first)):
            l2.prefetch_run(at, rows * row)
        # a lane a line: rows of v, k and q, then gates, then the ring's decays
        width = const_expr(LINE // (inputs[0].element_type.width // 8))
        lines = [-(-self.V // width), -(-self.K // width), -(-self.K // width), 1, 1]
        starts = [self.tokens * sum(lines[:i]) for i in range(6)]
        for m in cutlass.range_constexpr(starts[5] // 32 + 1):
            p = 32 * m + lane
            at = ring[2].iterator.toint()
            wanted = p == starts[5]
            for i, x in enumerate(inputs):
                if const_expr(starts[i] < 32 * (m + 1) and starts[i + 1] > 32 * m):
                    t = cutlass.min(cutlass.max(p - starts[i], 0) // lines[i], tokens - 1)
                    if const_expr(i < 3):
                        head = hv if const_expr(i == 0) else hq
                        part = (p - starts[i]) % lines[i] * width
                        source = x[n, t, head, None].iterator + part
                    else:
                        source = x[n, t, None].iterator + hv
                    mine = p >= starts[i] and p < starts[i + 1]
                    at = cutlass.select_(mine, source.toint(), at)
                    wanted = wanted or (mine and (first or i == 0))
            if wanted:
                l2.prefetch_line(at)

    def own_memory(self, smem, th):
        """A warp's shared memory for its rows of the state, in 16 bytes."""
        if not self.shared:
            return None
        vec, chunks = self.shape.vec, self.rows * self.K // self.shape.vec
        layout = cute.make_layout((self.row_warps, chunks, vec), stride=(chunks * vec, vec, 1))
        return smem.allocate_tensor(self.state_dtype, layout, 16)[th.warp, None, None]

    @cute.jit
    def run_rows(self, o, matrices, parts, x, mine, came, values, row0, th):
        """A warp's rows, `rows` at a time: the next ones are on their way while these are worked on."""
        found = None
        for it in cutlass.range_constexpr(self.passes):
            first = row0 + it * self.rows
            raw = came
            if const_expr(self.shared):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
            else:
                raw = self.turned(came)
            p = self.project(raw, o, th)
            if const_expr(it == 0):
                # F G, W and C W are there
                cute.arch.sync_threads()
                found = self.correlations(parts, x.after, th)
            these, own = values, x
            if const_expr(it + 1 < self.passes):
                row = first + self.rows
                came = self.load_state(mine.source, row, th)
                x = dataclasses.replace(x, u=self.load_corrections(mine.u, mine.live, row, th))
                values = self.load_tokens(mine.v, mine.span, mine.hv, row, th)
                cute.arch.sync_warp()
            self.answer(p, o, matrices, found, own, these, th)
            self.store_rows(p, mine, first, th)
            if mine.folds:
                self.fold(raw, own, mine.goal, mine.chance, first, th)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        heads: cute.FastDivmodDivisorV2, slots: Int32, tokens: Int32, ring_rows: Int32, ring_seed, later,
    ):  # fmt: skip
        th = fr.Thread.here()
        vt, hv, n = self.place()
        hq, within = divmod(hv, heads)
        slot, write_slot = self.slots_of(n, read_index, write_index, None, None, None)
        base = ring_base[n]
        count = ring_count[n]
        if const_expr(self.ahead > 0):
            requests = cute.arch.grid_dim()[2]
            next_n = cutlass.min(n + later, requests - 1)
            next_slot, next_base, next_count = (
                read_index[next_n],
                ring_base[next_n],
                ring_count[next_n],
            )
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
            live = self.window(base, count, ring_rows)
            k_rows = ring_k[Int64(slot), Int64(hq), None, None]
            u_rows = ring_u[Int64(slot), Int64(hv), None, None]
            decays = ring_decay[Int64(slot), Int64(hv), None]
            # ahead of the state, which is more: what is made of the ring is to be ready when the state comes
            old_decay = self.load_decay(decays, live, th.lane)
            old_keys = self.load_keys(k_rows, live, th)
            cute.arch.sync_warp()
            smem = SmemAllocator()
            source = state[Int64(slot), hv, None, None]
            own = self.own_memory(smem, th)
            came = self.ask_state(source, row0, th, own)
            old_u = self.load_corrections(u_rows, live, row0, th)
            values = self.load_tokens(v, span, hv, row0, th)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            if const_expr(self.ahead > 0):
                # not by the last warp, for which the others wait
                if th.warp == max(self.shape.warps - 2, 0) and n + later < requests:
                    later_live, _ = self.named(next_slot, next_slot, slots, null_index)
                    if later_live:
                        at = Int64(next_slot)
                        ring = (
                            ring_u[at, Int64(hv), None, None],
                            ring_k[at, Int64(hq), None, None],
                            ring_decay[at, Int64(hv), None],
                        )
                        window = self.window(next_base, next_count, ring_rows)
                        self.fetch_later(
                            ring,
                            window,
                            (v, k, q, a, b),
                            next_n,
                            hq,
                            hv,
                            within == 0,
                            tokens,
                            th.lane,
                        )
                cute.arch.sync_warp()
            o = allocate(smem, self.shape, False, False, k.element_type)
            rows = const_expr(self.shape.terms * self.ring)
            keys = smem.allocate_tensor(BF, matrix(rows, self.shape.stride, self.shape.stride), 16)
            matrices = smem.allocate_tensor(BF, cute.make_layout((self.matrices * MATRIX,)), 16)
            parts = smem.allocate_tensor(F32, self.parts_layout(), 16)
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
                # by the last warp, while the ring is on its way
                self.prepare(o, matrices, th, decay, beta, scale, use_qk_l2norm)
                words = self.key_words(old_keys)
                self.correlate(o, words, parts, th)
                if folds:
                    self.keep_keys(words, keys, th)
                after, total = self.behind(old_decay, th.lane)
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
                self.run_rows(o, matrices, parts, x, mine, came, values, row0, th)
        else:
            self.zero_rows(output, n, Int32(0), tokens, hv, v0, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return compiled(Ring(facts, knobs), facts, options, prefix)
