"""The rows of a state on their way to `layer`'s arithmetic, `ahead` chunks of them.

In registers, where 128 rows of a head leave room for three to five blocks a multiprocessor, which keep 40 to 48 KB in flight. Or, with
`copied`, in shared memory by cp.async: a thread copies what it will read itself, so that nothing waits for another thread, and
registers hold one chunk alone. Or, with `sent`, in shared memory by cp.async.bulk. What waits for one load into registers waits for
all that its thread has asked for: a warp has six scoreboards, and ptxas gives these loads one. So a convolution waits for rows of the
state too, or the rows are asked for behind its window; rows that are sent take no scoreboard. With `beyond` a thread asks L2 for what
a block so many further on will read, when that one has not started yet.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from gdntune.kernels import l2, recurrent

F32 = Float32


@dsl_user_op
def _store_run(to, source, size: int, first: bool, *, loc=None, ip=None) -> None:
    """Starts a copy of `size` bytes of shared memory, a multiple of 16, to global memory. first: in lines that L2 evicts first."""
    hint = Int64(l2.EVICT_FIRST).ir_value(loc=loc, ip=ip) if first else None
    nvvm.cp_async_bulk_global_shared_cta(
        to.to_llvm_ptr(loc=loc, ip=ip), source.to_llvm_ptr(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip),
        l2_cache_hint=hint, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def _bring_run(to, source, arrived, size: int, *, loc=None, ip=None) -> None:
    """Starts a copy of `size` bytes of global memory, a multiple of 16, to shared memory; an mbarrier counts them in."""
    nvvm.cp_async_bulk_shared_cluster_global(
        to.to_llvm_ptr(loc=loc, ip=ip), source.to_llvm_ptr(loc=loc, ip=ip), arrived.to_llvm_ptr(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip), loc=loc, ip=ip,
    )  # fmt: skip


class Sent(NamedTuple):
    """Shared memory for all chunks of a tile, and of each warp an mbarrier a chunk."""

    places: Any
    arrived: Any


class Rows(recurrent.Recurrent):
    """The compile-time facts of rows on their way; `ahead`, `copied` and `sent` are knobs beside `recurrent`'s."""

    def __init__(self, facts: dict, knobs: dict[str, Any]):
        # Heads of one q/k head lie one behind the other in states, v and outputs: to the delta rule they are rows of one tile.
        self.share, self.tile = knobs["share"], knobs["tile_v"]
        super().__init__(facts, {**knobs, "tile_v": self.tile * self.share})
        self.wide = self.V * self.share
        # of one value head
        self.head_chunks = self.tile // self.chunk
        self.ahead, self.copied, self.sent = knobs["ahead"], knobs["copied"], knobs["sent"]
        self.stores, self.beyond = knobs["stores"], knobs["beyond"]
        self.bulk = self.stores.startswith("bulk")
        # Chunks that a turn of the loop takes: registers have no index, so that each chunk on its way is written out.
        self.turn = 1 if self.copied or self.sent else self.ahead

    @cute.jit
    def first_rows(self, source, smem, v0, thread):
        """Asks for the first chunks of rows from v0 on; gives where they will be."""
        coming = None
        if const_expr(self.copied):
            coming = self.places(smem)
            for j in cutlass.range_constexpr(self.ahead):
                self.ask(source, coming, j, v0 + j * self.chunk + thread.group * self.RV, thread)
                cute.arch.cp_async_commit_group()
        elif const_expr(self.sent):
            coming = self.open_places(smem, thread.tid)
            self.send_for(source, coming, v0, thread)
        else:
            coming = self.fragments(self.state_dtype)
            if const_expr(self.early):
                for j in cutlass.range_constexpr(self.ahead):
                    row0 = v0 + j * self.chunk + thread.group * self.RV
                    self.copy_rows(source, coming[j, None, None], row0, thread.lane, False)
        return coming

    def further(self, n):
        """The request of a block `beyond` further on, and whether there is one."""
        _, places, requests = cute.arch.grid_dim()
        then = n + cutlass.max(self.beyond // places, 1)
        return cutlass.min(then, requests - 1), then < requests

    @cute.jit
    def fetch(self, state, slot, slots, hv, row0, rows, tid):
        """Asks L2 for rows of a slot, if it is one, by one thread and one instruction."""
        if tid == 0:
            if slot >= 0 and slot < slots:
                at = state[Int64(slot), hv, row0, None].iterator.toint()
                size = rows * (self.K * self.state_dtype.width // 8)
                l2.prefetch_run(at, size)

    @cute.jit
    def copy_rows(self, tile, raw, row0, lane, store: cutlass.Constexpr):
        """As `recurrent` does, but that L2 may be told to evict first what is stored: nobody reads it before the next step. 1 to 4% at
        batches whose states are about what L2 holds.
        """
        if const_expr(not store or self.stores == "plain"):
            recurrent.Recurrent.copy_rows(self, tile, raw, row0, lane, store)
        elif const_expr(self.bulk):
            self.send_rows(tile, raw, row0, lane)
        else:
            for i in cutlass.range_constexpr(self.RV):
                for c in cutlass.range_constexpr(self.KC):
                    at = cute.local_tile(tile[row0 + i, None], (self.vec,), (c * self.shares + lane,)).iterator.toint()
                    words = cute.recast_tensor(cute.local_tile(raw[i, None], (self.vec,), (c,)), Int32)
                    l2.store_evict_first(at, [words[0], words[1], words[2], words[3]])

    def open_stores(self, smem):
        """Where bulk stores leave from: of each warp two places for its rows, and which of them is next."""
        rows = self.RV * 32 // self.lanes
        shape = (self.warps, 2, rows, self.K)
        stride = (2 * rows * self.K, rows * self.K, self.K, 1)
        # both outlive the loops that store, and reach them beside `recurrent`'s arguments
        self.leaving = smem.allocate_tensor(self.state_dtype, cute.make_layout(shape, stride=stride), 128)
        self.turns = cute.make_rmem_tensor((1,), Int32)
        self.turns[0] = 0

    @cute.jit
    def send_rows(self, tile, raw, row0, lane):
        """A warp's rows, which lie one behind the other, to memory by one bulk store: no warp waits in line for memory to take its
        rows, as it does behind stores of its own.
        """
        tid, _, _ = cute.arch.thread_idx()
        turn = self.turns[0]
        self.turns[0] = 1 - turn
        place = self.leaving[tid // 32, turn, None, None]
        wl = tid % 32
        if wl == 0:
            # of the two places this one's rows have left
            cute.arch.cp_async_bulk_wait_group(1, read=True)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(self.RV):
            for c in cutlass.range_constexpr(self.KC):
                row = place[wl // self.lanes * self.RV + i, None]
                at = cute.local_tile(row, (self.vec,), (c * self.shares + lane,))
                cute.autovec_copy(cute.local_tile(raw[i, None], (self.vec,), (c,)), at)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if wl == 0:
            size = const_expr(self.RV * 32 // self.lanes * self.K * self.state_dtype.width // 8)
            _store_run(tile[row0, None].iterator, place.iterator, size, self.stores == "bulkfirst")
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def end_stores(self, tid):
        """Shared memory stays until all has left it."""
        if tid % 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def next_rows(self, source, coming, j: cutlass.Constexpr, row0, it, chunks, thread):
        """Chunk `it` of rows, from row0 on, in fp32; asks for the one that is `ahead` chunks further on. j: its place in registers."""
        fh = self.fragment(F32)
        further = row0 + self.ahead * self.chunk
        if const_expr(self.copied):
            # A group a turn, an empty one where nothing is left to ask for: the last `ahead` - 1 are those behind this chunk's.
            cute.arch.cp_async_wait_group(self.ahead - 1)
            place = it % self.ahead
            raw = self.fragment(self.state_dtype)
            for i in cutlass.range_constexpr(self.RV):
                for c in cutlass.range_constexpr(self.KC):
                    cute.autovec_copy(coming[place, i, c, thread.tid, None], cute.local_tile(raw[i, None], (self.vec,), (c,)))
            recurrent.widen(raw, fh, self.spread)
            if it + self.ahead < chunks:
                self.ask(source, coming, place, further, thread)
            cute.arch.cp_async_commit_group()
        elif const_expr(self.sent):
            cute.arch.mbarrier_wait(coming.arrived + (thread.tid // 32 * self.ahead + it), 0)
            raw = self.fragment(self.state_dtype)
            for i in cutlass.range_constexpr(self.RV):
                row = coming.places[it * self.chunk + thread.group * self.RV + i, None]
                for c in cutlass.range_constexpr(self.KC):
                    at = cute.local_tile(row, (self.vec,), (c * self.shares + thread.lane,))
                    cute.autovec_copy(at, cute.local_tile(raw[i, None], (self.vec,), (c,)))
            recurrent.widen(raw, fh, self.spread)
        else:
            raw = coming[j, None, None]
            if const_expr(not self.early):
                self.copy_rows(source, raw, row0, thread.lane, False)
            recurrent.widen(raw, fh, self.spread)
            if const_expr(self.early and self.chunks > self.ahead):
                if it + self.ahead < chunks:
                    self.copy_rows(source, raw, further, thread.lane, False)
        return fh

    @cute.jit
    def open_places(self, smem, tid):
        """Where rows are sent to, and of each warp an mbarrier a chunk."""
        places = smem.allocate_tensor(self.state_dtype, cute.make_layout((self.tile_v, self.K), stride=(self.K, 1)), 128)
        arrived = smem.allocate_array(Int64, self.warps * self.ahead)
        if tid % 32 == 0:
            first = tid // 32 * self.ahead
            for j in cutlass.range_constexpr(self.ahead):
                cute.arch.mbarrier_init(arrived + (first + j), 1)
            # the copies' hardware sees them
            cute.arch.mbarrier_init_fence()
        return Sent(places, arrived)

    @cute.jit
    def send_for(self, source, coming, v0, thread):
        """Starts the copies of a warp's rows of all chunks, by one thread. A warp waits for its own rows alone, so that the first ones
        to come are worked on while others are on their way.
        """
        rows = const_expr(self.RV * 32 // self.lanes)
        size = const_expr(rows * self.K * self.state_dtype.width // 8)
        if thread.tid % 32 == 0:
            first = thread.tid // 32 * self.ahead
            for j in cutlass.range_constexpr(self.ahead):
                row = j * self.chunk + thread.group * self.RV
                arrived = coming.arrived + (first + j)
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, size)
                _bring_run(coming.places[row, None].iterator, source[v0 + row, None].iterator, arrived, size)
        cute.arch.sync_warp()

    @cute.jit
    def ask(self, source, places, place, row0, thread):
        """Starts the copies of a thread's share of a chunk of rows."""
        mode = cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(mode, self.state_dtype, num_bits_per_copy=self.vec * self.state_dtype.width)
        for i in cutlass.range_constexpr(self.RV):
            for c in cutlass.range_constexpr(self.KC):
                m = cute.local_tile(source[row0 + i, None], (self.vec,), (c * self.shares + thread.lane,))
                cute.copy(atom, m, places[place, i, c, thread.tid, None])

    def places(self, smem):
        """Shared memory for `ahead` chunks, neighbouring threads' loads side by side."""
        shape = (self.ahead, self.RV, self.KC, self.threads, self.vec)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return smem.allocate_tensor(self.state_dtype, cute.make_layout(shape, stride=tuple(strides)), 16)

    def fragments(self, dtype):
        """Registers for the rows of `ahead` chunks, one of them as in `fragment`."""
        stride = (self.RK, 1) if self.k_last else (1, self.RV)
        size = self.RV * self.RK
        return cute.make_rmem_tensor(cute.make_layout((self.ahead, self.RV, self.RK), stride=(size, *stride)), dtype)
