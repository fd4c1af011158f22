"""Rows of the state that `wy_block` keeps in shared memory until it multiplies them.

A block asks for all its rows before anything else. In registers they take up to half of what a thread has while it computes operands,
and whoever waits for k, q and gates waits for rows too: a thread waits for its loads into registers in a few groups, of which rows and
inputs share one. Here the last `octets` of a warp's come by cp.async: a thread copies what it will read itself, so that nothing waits
for another thread. For the final state a thread reads them once more, and 16 bytes of each row go to memory as they are computed.
"""

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
        mode = cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(mode, d.state_dtype, num_bits_per_copy=128)
        for source, at, n in d.runs(tile, row0, th):
            octet, run = at // d.share, at % d.share // vec
            if octet < self.first:
                cute.autovec_copy(source, fr.view(x, at, (n,), (1,)))
            else:
                cute.copy(atom, source, self.places[octet - self.first, run, th.tid, None])
        cute.arch.cp_async_commit_group()
        return x

    def wait(self) -> None:
        """Until a thread's own copies are there."""
        cute.arch.cp_async_wait_group(0)

    def take(self, x, first: int, end: int, th) -> None:
        """Elements `first` to `end` of a thread's share of each copied row, into registers: the 16 bytes that begin there."""
        d, vec = self.d, self.d.shape.vec
        for run in range(-(-first // vec), -(-end // vec)):
            for octet in range(self.octets):
                at = (self.first + octet) * d.share + run * vec
                cute.autovec_copy(
                    self.places[octet, run, th.tid, None], fr.view(x, at, (vec,), (1,))
                )
