"""A warp's rows of the state, as `wy_block` takes them: on their way between memory and registers, as
operands, and projected.

Lanes (g, c) have row g of each eight rows and a quarter of its keys, 16 bytes at a time. Other ways
to move and multiply them stand in modules of their own: `wy_block_columns`, `wy_block_copied`,
`wy_block_lines`, `wy_block_tf32`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, const_expr

from gdntune.kernels import decode
from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block_ahead import Ahead
from gdntune.kernels.wy_block_columns import Columns
from gdntune.kernels.wy_block_copied import Copied, Whole
from gdntune.kernels.wy_block_gdn import RowStage
from gdntune.kernels.wy_block_kda import KeyStage
from gdntune.kernels.wy_block_lines import Lines
from gdntune.kernels.wy_block_tf32 import Tf32
from gdntune.kernels.wy_operands import FIRST, Operands, Shape

F32, BF = Float32, BFloat16
# of bf16, that hold a significand
TERMS = {"bf16": 1, "fp16": 2, "fp32": 3}
# products of terms whose orders add up to more than this are below fp32's roundoff
HIGHEST_ORDER = 2


class BlockRows(decode.Decode):
    """Knobs as compile-time facts, and the state up to its projection on k and q."""

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
        # of the Gram matrices, that a warp has (KDA)
        self.gram_columns = knobs.get("columns", 4)
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
        copied, lines = knobs.get("copied"), knobs.get("lines")
        self.copied_by = (Whole if lines else Copied)(self, copied) if copied else None
        self.lines_by = (self.copied_by or Lines(self)) if lines else None
        self.ahead = Ahead(self, knobs["ahead"]) if knobs.get("ahead") else None
        self.tf32 = Tf32(self) if knobs.get("tf32") else None
        self.fence = knobs.get("fence", False)
        # what a product reads of shared memory is asked for one product earlier
        self.early_reads = bool(copied and lines)
        # whether a final state goes to memory as it is computed
        by_parts = (self.lines_by, self.tf32, self.copied_by)
        self.stores_early = any(x is not None for x in by_parts)
        vec = 16 // (self.state_dtype.width // 8)
        k_terms = TERMS[facts["input_dtype"]]
        self.shape = Shape(
            self.K,
            self.tokens,
            vec,
            2 if self.per_k else k_terms,
            self.u_terms if self.per_k else k_terms,
            threads,
            knobs["matrices"],
            self.tf32 is not None,
            self.per_k and self.tf32 is None,
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
        if self.copied_by:
            return self.copied_by.load(tile, row0, th)
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

    @cute.jit
    def store_runs(
        self, x, goals: cutlass.Constexpr, first: cutlass.Constexpr, end: cutlass.Constexpr, writes
    ):
        """Of each row the 16 bytes that end with elements `first` to `end` of a thread's share."""
        if writes:
            for goal, at, n in goals:
                if const_expr(first < at % self.share + n <= end):
                    cute.autovec_copy(fr.view(x, at, (n,), (1,)), goal)

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
        words = [fr.wide(fr.pair(raw, at + 2 * f), 2) for f in range(2)]
        return [fr.operand_b(b) for b in fr.terms_of(words, self.state_terms)]

    def project(self, raw, o: Operands, th):
        """P of the warp's rows: first k's, then q's; in registers as products leave them."""
        if self.tf32:
            return self.tf32.project(raw, o, th)
        s, C = self.shape, self.chains
        p = fr.registers(C * s.tiles * self.octets * 4, F32, 0.0)
        bases = [s.place_a(th, a) for a in range(s.fragments)]
        if self.copied_by:
            self.copied_by.wait()
        first = fr.registers(8, BF, 0.0)
        for x in range(s.products):
            if self.copied_by:
                self.copied_by.take(raw, 4 * x, 4 * x + 4, th)
            states = [self.state_operands(raw, j, x) for j in range(self.octets)]
            if s.first:
                self.read_first(o, x, first, th)
                for j in range(self.octets):
                    fr.mma(fr.accumulator(p, j * 4), fr.operand_a(first), states[j][0])
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
        return p

    @cute.jit
    def read_first(self, o: Operands, x: cutlass.Constexpr, A, th):
        """The first tokens' next term as A's registers: rows of k and of q, by the lanes that have them; the others' stay zero."""
        if const_expr(self.shape.packed):
            if th.g % 4 < FIRST:
                for half in cutlass.range_constexpr(2):
                    source = o.first[x, th.g % 4, th.c, half, th.g // 4, None]
                    cute.autovec_copy(source, fr.pair(A, 4 * half))
        else:
            if th.g < FIRST:
                source = o.first[x, th.g, th.c, None, None, None]
                cute.autovec_copy(cute.make_tensor(source.iterator, cute.make_layout((8,))), A)

    def write_projections(self, p, th, sP) -> None:
        """What `project` left, to shared memory, a row of V a line."""
        s = self.shape
        for n in range(s.tiles):
            for j in range(self.octets):
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
