"""The state's rows, as `ring` takes them: on their way in, as operands of a product, and folded with the ring to where they are stored."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, const_expr
from cutlass.cute.nvgpu import cpasync

from gdntune.kernels import fragments as fr
from gdntune.kernels import rounding
from gdntune.kernels.ring_window import TERMS, Corrected, RingWindow

BF = BFloat16


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
class Chance:
    """To round a state at random: the seed, and what of a counter is the block's, its head and slot."""

    seed: Any
    head: Any
    slot: Any


class RingRows(RingWindow):
    """What a warp does with its rows of the state."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.shared = knobs["shared"]
        # of 16 rows of V
        self.row_tiles = self.octets // 2
        # of F x where it is folded: with two, 32 entries in an fp32 state came to 1.09 of the tolerance
        self.fold_terms = TERMS + (self.state_dtype is not BF)
        self.at_random = facts["ring_rounding"] == "stochastic"

    def own_memory(self, smem, th):
        """A warp's shared memory for its rows of the state, in 16 bytes."""
        if not self.shared:
            return None
        vec, chunks = self.shape.vec, self.rows * self.K // self.shape.vec
        layout = cute.make_layout((self.row_warps, chunks, vec), stride=(chunks * vec, vec, 1))
        return smem.allocate_tensor(self.state_dtype, layout, 16)[th.warp, None, None]

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
        return [fr.operand_a(a) for a in fr.terms_of(words, self.state_terms)]

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

    def draw(self, chance, row0, n: int, th):
        """Words for eight of a thread's elements, the n-th of its rows at row0; None where states are rounded to nearest."""
        if not self.at_random:
            return None
        counter = (row0 * 32 + th.lane) * (self.octets * self.share // rounding.EACH) + n
        return rounding.philox(counter, chance.head, chance.slot, chance.seed)

    def store_runs(self, held: Held, goal, row0, first: int, end: int, th) -> None:
        """The runs of a thread's rows that the elements first to end - 1 complete."""
        for to, at, n in self.runs(goal, row0, th):
            octet, element = divmod(at, self.share)
            if first < element + n <= end:
                place = held.x.iterator + held.at(octet, element)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout((n,))), to)
