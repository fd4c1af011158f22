"""Rows of the state that `wy_block` keeps in shared memory until it multiplies them.

A block asks for all its rows before anything else. In registers they take up to half of what a thread has while it computes operands,
and whoever waits for k, q and gates waits for rows too: a thread waits for its loads into registers in a few groups, of which rows and
inputs share one. Here the last `octets` of a warp's come by cp.async: a thread copies what it will read itself, so that nothing waits
for another thread. For the final state a thread reads them once more, and 16 bytes of each row go to memory as they are computed.
"""

import itertools

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gdntune.kernels import fragments as fr


class Copied:
    """What `wy_block` does otherwise with these rows."""

    def __init__(self, decode, octets: int):
        self.d, self.octets = decode, octets
        self.first = decode.octets - octets

    def load(self, tile, row0, th):
        """Issues the loads of a warp's rows. Registers for all of them, of which those of the copied ones are filled by `take`."""
        d, vec = self.d, self.d.shape.vec
        x = cute.make_rmem_tensor((d.octets * d.share,), d.state_dtype)
        shape = (self.octets, d.share // vec, d.shape.threads, vec)
        layout = cute.make_ordered_layout(shape, order=(3, 2, 1, 0))
        # outlives the loads, and is found beside the registers
        self.places = SmemAllocator().allocate_tensor(d.state_dtype, layout, 16)
        atom = copy_16(d.state_dtype)
        for source, at, n in d.runs(tile, row0, th):
            octet, run = at // d.share, at % d.share // vec
            if octet < self.first:
                cute.autovec_copy(source, fr.view(x, at, (n,), (1,)))
            else:
                cute.copy(atom, source, self.place(octet - self.first, run, th))
        cute.arch.cp_async_commit_group()
        return x

    def place(self, octet, run, th):
        """Where a thread has 16 bytes of an octet's rows."""
        return self.places[octet, run, th.tid, None]

    def wait(self) -> None:
        """Until copies are there that this thread reads."""
        cute.arch.cp_async_wait_group(0)

    def take(self, x, first: int, end: int, th) -> None:
        """Elements `first` to `end` of a thread's share of each copied row, into registers: the 16 bytes that begin there."""
        d, vec = self.d, self.d.shape.vec
        for run in range(-(-first // vec), -(-end // vec)):
            for octet in range(self.octets):
                at = (self.first + octet) * d.share + run * vec
                cute.autovec_copy(self.place(octet, run, th), fr.view(x, at, (vec,), (1,)))


class Whole(Copied):
    """Rows that a warp copies and writes whole, 512 bytes at a time, where operands want 64 of each of eight rows. So another lane copies
    what a thread reads; what a thread computes goes to the same place, and at the end the warp writes its rows one behind the other.
    Memory turns less often between reads and writes: of a final state at 256 requests 2% of the time (H200; KDA, fp32 at T=8, bf16 at
    T=4). Written in lines of 128 bytes as soon as these are computed, rows take 1 to 2% more than by halves of lines.

    Of odd rows the 16 bytes lie exchanged by fours: eight lanes that read at once, four of a row and of the next one, do not meet in a
    bank.
    """

    def load(self, tile, row0, th):
        """Issues the loads of a warp's rows; registers as above."""
        d = self.d
        x = cute.make_rmem_tensor((d.octets * d.share,), d.state_dtype)
        shape = (d.shape.warps, 8 * self.octets * d.K)
        layout = cute.make_ordered_layout(shape, order=(1, 0))
        self.places = SmemAllocator().allocate_tensor(d.state_dtype, layout, 16)[th.warp, None]
        atom = copy_16(d.state_dtype)
        for memory, place in self.pieces(tile, row0 + 8 * self.first, th):
            cute.copy(atom, memory, place)
        cute.arch.cp_async_commit_group()
        for source, at, n in d.runs(tile, row0, th):
            if at // d.share < self.first:
                cute.autovec_copy(source, fr.view(x, at, (n,), (1,)))
        return x

    def turned(self, x, th):
        """What comes is in operands' order."""
        return x

    def pieces(self, tile, row0, th):
        """A lane's 16 bytes of memory and their place, of as many neighbouring rows at a time as 32 lanes have."""
        d, vec = self.d, self.d.shape.vec
        each = d.K // vec
        for i in range(0, 8 * self.octets * each, 32):
            if each >= 32:
                row, piece = i // each, i % each + th.lane
            else:
                row, piece = i // each + th.lane // each, th.lane % each
            memory = cute.local_tile(tile[row0 + row, None], (vec,), (piece,))
            yield memory, self.at(row * d.K + (piece ^ (row % 2 * 4)) * vec)

    def at(self, offset):
        """16 bytes of the warp's rows."""
        vec = self.d.shape.vec
        offset = cute.assume(offset, divby=vec)
        return cute.make_tensor(self.places.iterator + offset, cute.make_layout((vec,)))

    def place(self, octet, run, th):
        d, vec = self.d, self.d.shape.vec
        # neighbouring runs lie exchanged in odd rows: so much further on, or so much back
        exchange = th.g % 2 * (4 * vec if run % 2 == 0 else -4 * vec)
        return self.at((8 * octet * d.K + 4 * run * vec) + (th.g * d.K + th.c * vec + exchange))

    def wait(self) -> None:
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def store(self, x, tile, row0, th, writes, first: int, end: int) -> None:
        """Keeps what ends among columns of eight keys `first` to `end`; behind the last of them all rows go to memory."""
        d, vec = self.d, self.d.shape.vec
        for run in range(2 * first // vec, 2 * end // vec):
            for octet in range(self.octets):
                at = octet * d.share + run * vec
                cute.autovec_copy(fr.view(x, at, (vec,), (1,)), self.place(octet, run, th))
        if 2 * end == d.share:
            self.write(tile, row0, th, writes)

    @cute.jit
    def write(self, tile, row0, th, writes):
        cute.arch.sync_warp()
        if writes:
            for memory, place in self.pieces(tile, row0, th):
                cute.autovec_copy(place, memory)


def each_read(places, read, early: bool):
    """Each place and what was read for it; early: ahead of the work on the place before it, since nothing that is read from shared
    memory moves up past what was written there.
    """
    found = read(places[0]) if early else None
    for place, after in itertools.pairwise([*places, None]):
        now = found if early else read(place)
        if early and after is not None:
            found = read(after)
        yield place, now


def copy_16(dtype):
    """16 bytes from memory to shared memory, past L1."""
    mode = cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
    return cute.make_copy_atom(mode, dtype, num_bits_per_copy=128)
