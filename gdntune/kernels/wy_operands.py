"""Where `wy_block` keeps what depends on q, k and the gates alone: operands in shared memory, in the order in which mma reads them.

Keys are permuted so that a thread's share of the state, which it reads 16 bytes at a time, is an operand as it is. A thread c of a row
has the keys (4 r + c) vec + i, i < vec, of each run r; two neighbours of them are a word, and words i of the four threads are 8
columns of a matrix: matrix m = r vec / 2 + i. A row of operands is K / 8 such matrices, 16 bytes each.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from gdntune.kernels import wy_block_tf32

F32, BF = Float32, BFloat16
# rows of 16 bytes beside one another: eight of them lie in different banks
PAD = 8
# where D_(T, i) begins beside D_T, both of a head
SPAN_DECAYS = 4
# tokens whose operands have one term more, which see their places first
FIRST = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes known when a kernel is compiled.

    vec: state elements of one 16-byte load. terms: of bf16, that hold an operand of the projection. key_terms: those of a key where
    it meets u in the final state. in_order: keys are not permuted: nobody loads a row's keys side by side. tf32: operands are TF32.
    """

    K: int
    tokens: int
    vec: int
    terms: int
    key_terms: int
    threads: int
    in_order: bool = False
    tf32: bool = False
    first: bool = False

    @property
    def packed(self) -> bool:
        """Up to four tokens k and q are half of mma's 16 rows, and the next term is the other half."""
        return self.tokens <= 4

    @property
    def tiles(self) -> int:
        """Tiles of eight tokens."""
        return -(-self.tokens // 8)

    @property
    def N(self) -> int:
        """Tokens that shared memory has room for."""
        return 4 if self.packed else 8 * self.tiles

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def stride(self) -> int:
        return self.K + PAD

    @property
    def products(self) -> int:
        """Products of 16 along K."""
        return self.K // 16

    @property
    def rows(self) -> int:
        """Rows of the projection's operand."""
        return 2 * self.N * self.terms

    @property
    def fragments(self) -> int:
        """Of 16 rows; what the last lacks is read from one row of zeros."""
        return -(-self.rows // 16)

    @property
    def zero_rows(self) -> int:
        return 1 if self.rows % 16 else 0

    @property
    def groups(self) -> int:
        """Times that the keys of some columns are read for the final state."""
        if self.packed:
            return 2 if self.key_terms == 3 else 1
        return self.key_terms * self.tiles

    @property
    def step(self) -> int:
        """Columns of eight keys that are read at a time; packed, two terms of a column are two matrices."""
        return 4 // min(self.key_terms, 2) if self.packed else 4

    @property
    def spare(self) -> int:
        """Bytes of x and, where they lie behind it, of k, q and decays a key."""
        # inputs have 16 bits
        x = 2 * self.stride * (self.rows + self.zero_rows) + 4 * self.K * FIRST * self.first
        if self.tf32:
            x = 4 * self.K * 2 * self.N
        return x + self.tokens * self.K * (2 * 2 + 4)

    def matrices(self, group: int) -> int:
        """How many matrices a group is; packed, the third terms' have one a column."""
        return 2 if self.packed and group == 1 else 4

    def row(self, term, which, t):
        """The row of a token's k (which=0) or q."""
        if self.packed:
            return term * 8 + which * 4 + t
        return ((term * self.tiles + t // 8) * 2 + which) * 8 + t % 8

    def word(self, p):
        """The word of a row at which keys 2p and 2p + 1 lie."""
        if self.in_order:
            return p
        W = self.vec // 2
        return (p // (4 * W) * W + p % W) * 4 + p // W % 4

    def place_a(self, th, fragment: int):
        """Where a lane's row of a fragment begins, for four matrices: rows g, rows g + 8, then both of the next eight columns."""
        row = 16 * fragment + th.lane % 16
        if self.zero_rows and fragment == self.fragments - 1:
            row = cutlass.min(row, self.rows)
        return row * self.stride + th.lane // 16 * 8

    def first_term(self, fragment: int) -> int:
        """The first term of a fragment of 16 rows."""
        return 2 * fragment if self.packed else fragment // self.tiles

    def tile(self, fragment: int) -> int:
        return fragment % self.tiles


@dataclasses.dataclass(frozen=True)
class Operands:
    """A block's shared memory.

    x [rows, stride] bf16: operands of the projection. first [products, FIRST, 4, 2, 2, 2] bf16: the first tokens' next term, of each
    product and lane c the first two keys of k and of q, then the next two (KDA). keys [key_terms N, stride] bf16: what u meets in the final state; None where
    these are rows of x. decay: fp32, D_T of each key (KDA), or D_T and then D_(T, i) of each token (GDN). gram [2, N, N] fp32:
    of pairs of tokens, F k.k, F k.q. factors [N, 4] fp32: beta / |k|, beta / |k|^2, what q is multiplied by, D_t. squares [2, N] fp32:
    sums of squares (GDN). raw [T, K / 2, 4], of each two keys k and
    then q as they came, and decays [T, K] fp32 (KDA). spare: bytes from x on that nobody reads
    once all warps have projected their only rows and have what hangs on pairs of tokens (KDA).
    """

    x: cute.Tensor
    first: cute.Tensor | None
    keys: cute.Tensor | None
    decay: cute.Tensor | None
    gram: cute.Tensor
    factors: cute.Tensor
    squares: cute.Tensor | None
    raw: cute.Tensor | None
    decays: cute.Tensor | None
    spare: int = 0


def matrix(rows: int, columns: int, stride: int):
    """The layout of rows beside one another, `stride` elements apart."""
    return cute.make_layout((rows, columns), stride=(stride, 1))


def allocate(smem, s: Shape, per_k: bool, update: bool, dtype) -> Operands:
    """The operands of a block; dtype: of k and q as they come."""
    N = s.N
    first = keys = raw = decays = None
    if s.tf32:
        x = wy_block_tf32.projection(smem, s.K)
    else:
        x = smem.allocate_tensor(BF, matrix(s.rows + s.zero_rows, s.stride, s.stride), 16)
    if s.first:
        shape, stride = (s.products, FIRST, 4, 2, 2, 2), (32 * FIRST, 32, 8, 4, 2, 1)
        layout = cute.make_layout(shape, stride=stride)
        first = smem.allocate_tensor(BF, layout, 16)
    if per_k:
        # right behind these, with which they are spare
        raw = smem.allocate_tensor(
            dtype, cute.make_layout((s.tokens, s.K // 2, 4), stride=(2 * s.K, 4, 1)), 16
        )
        decays = smem.allocate_tensor(F32, matrix(s.tokens, s.K, s.K), 16)
    if per_k and update and s.tf32:
        keys = wy_block_tf32.keys(smem, s.K)
    elif per_k and update:
        keys = smem.allocate_tensor(BF, matrix(s.key_terms * N, s.stride, s.stride), 16)
    gram = smem.allocate_tensor(F32, cute.make_layout((2, N, N), stride=(N * N, N, 1)), 16)
    factors = smem.allocate_tensor(F32, matrix(N, 4, 4), 16)
    decay = squares = None
    if per_k:
        decay = smem.allocate_tensor(F32, cute.make_layout((s.K,)), 16)
    else:
        decay = smem.allocate_tensor(F32, cute.make_layout((SPAN_DECAYS + N,)), 16)
        squares = smem.allocate_tensor(F32, matrix(2, N, N), 16)
    return Operands(
        x, first, keys, decay, gram, factors, squares, raw, decays, s.spare if per_k else 0
    )


@cute.jit
def clear_last_row(s: cutlass.Constexpr, o, tid):
    """Zeros where the last fragment has no rows."""
    if cutlass.const_expr(s.zero_rows):
        words = cute.recast_tensor(o.x[s.rows, None], cutlass.Int32)
        for i in cutlass.range(tid, s.stride // 2, s.threads, unroll=1):
            words[i] = cutlass.Int32(0)
