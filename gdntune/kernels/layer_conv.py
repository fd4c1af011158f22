"""A layer's convolution: which channels a block convolves, its window as a ring or shifted in place, its inputs in shared memory.

Windows are rings: new rows go where no block reads, so the blocks of a q/k head need not wait for one another, and drafts that were
not accepted are taken back by the position alone. Each block convolves the head's 2 K channels anew, beside its own rows of V; one of
them stores the new rows.

Windows that are shifted in place are read by all blocks of a q/k head before one of them moves it on: these are one block, or a
cluster whose blocks say that they have read it, which the one that stores waits for at its end.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gdntune.kernels import gates, layer_rows

F32 = Float32


class Conv(NamedTuple):
    """A call's convolution: its tensors, the q/k heads, the rows of a ring, and the value heads of a q/k head."""

    mixed: Any
    state: Any
    weight: Any
    bias: Any
    position: Any
    H: Any
    rows: Any
    ratio: Any


class Taps(NamedTuple):
    """Of a thread's channels: their numbers, where they are in a token's row, weights and biases."""

    channels: Any
    places: Any
    weight: Any
    bias: Any


class Convolved(layer_rows.Rows):
    """The compile-time facts of a convolution ahead of the delta rule, where the contract has one."""

    def __init__(self, facts: dict, knobs: dict[str, Any]):
        super().__init__(facts, knobs)
        self.conv, self.width = facts["conv"], facts["conv_width"]
        self.convolves = self.conv != "none"
        self.shifted, self.dims_first = facts.get("shifted", False), facts.get("dims_first", False)
        self.interleaved = facts.get("interleaved", False)
        # channels that a block convolves; those of a load, and loads of them that a thread makes
        self.channels = 2 * self.K + self.tile_v
        self.roles = knobs["roles"]
        self.asked_first = self.roles and knobs["window_first"]
        # Whether a warp that has no channels asks for none: with roles, and of several tokens wherever warps are apart.
        self.lean = self.roles or (knobs["apart"] and self.loop)
        self.load = 2 if self.channels <= 2 * self.threads and not self.lean else 4
        self.rounds = -(-self.channels // (self.load * self.threads))

    @cute.jit
    def channel(self, e, block, H):
        """The packed row's channel that is the block's e-th: K of q, K of k, tile_v of v."""
        c = block.hq * self.K + e
        c = cutlass.select_(e >= self.K, H * self.K + c - self.K, c)
        of_v = 2 * H * self.K + block.hv * self.V + block.v0 + e - 2 * self.K
        return cutlass.select_(e >= 2 * self.K, of_v, c)

    @cute.jit
    def place_of(self, e, block, ratio):
        """Where a token's row of q/k heads side by side has the block's e-th channel."""
        ahead = (block.hv - block.hq * ratio) * self.V + block.v0
        return block.hq * 2 * (self.K + ratio * self.V) + e + cutlass.select_(e >= 2 * self.K, ahead, Int32(0))

    @cute.jit
    def read_taps(self, conv, mine, block, tid):
        """Issues the loads of a thread's weights and biases. Threads beyond the last channel have the last ones' too."""
        channels = cute.make_rmem_tensor((self.rounds,), Int32)
        places = cute.make_rmem_tensor((self.rounds,), Int32) if const_expr(self.interleaved) else channels
        W = const_expr(self.load * self.width)
        rw = cute.make_rmem_tensor(cute.make_layout((self.rounds, W), stride=(W, 1)), conv.weight.element_type)
        rb = None
        if const_expr(conv.bias is not None):
            rb = self.per_channel(conv.bias.element_type)
        for r in cutlass.range_constexpr(self.rounds):
            e = cutlass.min((r * self.threads + tid) * self.load, mine - self.load)
            channels[r] = self.channel(e, block, conv.H)
            if const_expr(self.interleaved):
                places[r] = self.place_of(e, block, conv.ratio)
            if const_expr(not self.lean) or self.has_channels(tid):
                cute.autovec_copy(cute.local_tile(conv.weight, (W,), (channels[r] // self.load,)), rw[r, None])
                if const_expr(conv.bias is not None):
                    self.read_channels(conv.bias, channels[r], rb[r, None])
        return Taps(channels, places, rw, rb)

    def has_channels(self, tid):
        """Whether a thread's warp has channels to convolve."""
        return tid // 32 * 32 < self.channels // self.load

    def per_channel(self, dtype):
        """Registers for a value of each of a thread's channels."""
        return cute.make_rmem_tensor(cute.make_layout((self.rounds, self.load), stride=(self.load, 1)), dtype)

    @cute.jit
    def read_channels(self, source, c, target):
        cute.autovec_copy(cute.local_tile(source, (self.load,), (c // self.load,)), target)

    @cute.jit
    def read_window(self, conv, slot, held, at, taps):
        """Issues the loads of the rows before row `at` of a slot's ring, the oldest first; zeros where no slot is `held`."""
        rr = self.per_row(self.width - 1, conv.state.element_type)
        if const_expr(self.intermediate == "slots"):
            rr.fill(0.0)
            if held:
                self.read_rows_before(conv, slot, at, taps, rr)
        else:
            self.read_rows_before(conv, slot, at, taps, rr)
        return rr

    @cute.jit
    def read_rows_before(self, conv, slot, at, taps, rr):
        for r in cutlass.range_constexpr(self.rounds):
            for j in cutlass.range_constexpr(self.width - 1):
                row = at + (j + 1 - self.width)
                row = cutlass.select_(row < 0, row + conv.rows, row)
                self.read_channels(conv.state[Int64(slot), row, None], taps.channels[r], rr[r, j, None])

    @cute.jit
    def ask_window(self, conv, slot, held, at, taps, tid):
        """`read_window` by the warps that have channels, where others ask for rows of the state meanwhile: these are many, and a window
        that stands behind them comes a microsecond late. Addresses are computed by all, so that the loads are predicated; with
        `window_first` the other warps wait until they are issued.
        """
        rr = self.per_row(self.width - 1, conv.state.element_type)
        wanted = self.has_channels(tid)
        if const_expr(self.intermediate == "slots"):
            rr.fill(0.0)
            wanted = wanted and held
        for r in cutlass.range_constexpr(self.rounds):
            for j in cutlass.range_constexpr(self.width - 1):
                row = at + (j + 1 - self.width)
                row = cutlass.select_(row < 0, row + conv.rows, row)
                ring = conv.state[Int64(slot), row, None]
                source = cute.local_tile(ring, (self.load,), (taps.channels[r] // self.load,))
                if wanted:
                    cute.autovec_copy(source, rr[r, j, None])
        if const_expr(self.asked_first):
            if self.has_channels(tid):
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=self.threads)
            else:
                cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
        return rr

    def per_row(self, rows, dtype):
        """Registers for so many rows of a thread's channels."""
        stride = (rows * self.load, self.load, 1)
        return cute.make_rmem_tensor(cute.make_layout((self.rounds, rows, self.load), stride=stride), dtype)

    @cute.jit
    def convolve(self, taps, window, new, sX, mine, block, tid):
        """A thread's channels of all tokens convolved, to shared memory as the unfused path rounds them. mine: of the block's heads.

        Tokens that a call has not are computed too, of whatever is in their registers: a branch a token would keep one's silu from
        overlapping the next one's.
        """
        old = const_expr(self.width - 1)
        for r in cutlass.range_constexpr(self.rounds):
            e = (r * self.threads + tid) * self.load
            # v stands where its rows are among all of V
            place = cutlass.select_(e >= 2 * self.K, e + block.v0, e)
            if e < mine:
                for t in cutlass.range_constexpr(self.tokens):
                    y = cute.make_rmem_tensor((self.load,), sX.element_type)
                    for i in cutlass.range_constexpr(self.load):
                        x = new[r, t, i].to(F32) * taps.weight[r, self.width * i + old].to(F32)
                        for j in cutlass.range_constexpr(old):
                            before = window[r, t + j, i] if const_expr(t + j < old) else new[r, t + j - old, i]
                            x += before.to(F32) * taps.weight[r, self.width * i + j].to(F32)
                        if const_expr(taps.bias is not None):
                            x += taps.bias[r, i].to(F32)
                        if const_expr(self.conv == "silu"):
                            x = x * gates.sigmoid(x)
                        y[i] = x.to(sX.element_type)
                    cute.autovec_copy(y, cute.local_tile(sX[t, None], (self.load,), (place // self.load,)))

    @cute.jit
    def store_window(self, conv, slot, at, taps, window, new, mine, block, first, tid):
        """What a call leaves of a window in a slot."""
        if const_expr(self.shifted):
            self.store_shifted(conv, slot, window, taps, new, mine, block, first, tid)
        else:
            self.store_new(conv, slot, at, taps, new, mine, block, first, tid)

    @cute.jit
    def store_shifted(self, conv, slot, window, taps, new, mine, block, first, tid):
        """A window moved on, by threads that have read it: v's channels by their own block, q's and k's by the `first` of a head's.

        Drafts move it by one row, since it is not known yet how many of them stay; others by their tokens.
        """
        old = const_expr(self.width - 1)
        step = Int32(1) if const_expr(self.intermediate == "slots") else block.length
        for r in cutlass.range_constexpr(self.rounds):
            e = (r * self.threads + tid) * self.load
            if e < mine and block.length > 0 and (e >= 2 * self.K or first):
                for j in cutlass.range_constexpr(old):
                    self.store_row(conv, slot, j - step, taps.channels[r], window[r, j, None])
                for t in cutlass.range_constexpr(self.tokens):
                    if t < block.length:
                        self.store_row(conv, slot, old + t - step, taps.channels[r], new[r, t, None])

    @cute.jit
    def store_row(self, conv, slot, row, channel, source):
        """A thread's channels of one row, where the window has it."""
        if row >= 0 and row < conv.rows:
            cute.autovec_copy(source, cute.local_tile(conv.state[Int64(slot), row, None], (self.load,), (channel // self.load,)))

    @cute.jit
    def store_new(self, conv, slot, at, taps, new, mine, block, first, tid):
        """The window's new rows: v's channels by their own block, q's and k's by the `first` of those that share the head."""
        for r in cutlass.range_constexpr(self.rounds):
            e = (r * self.threads + tid) * self.load
            for t in cutlass.range_constexpr(self.tokens):
                if t < block.length and e < mine and (e >= 2 * self.K or first):
                    row = at
                    if const_expr(t > 0):
                        row = cutlass.select_(at + t >= conv.rows, at + t - conv.rows, at + t)
                        # a ragged request may be longer than its call said, and must stay in its slot
                        row = cutlass.min(row, conv.rows - 1)
                    ring = conv.state[Int64(slot), row, None]
                    cute.autovec_copy(new[r, t, None], cute.local_tile(ring, (self.load,), (taps.channels[r] // self.load,)))

    def values_of(self, sX):
        """v of shared memory under the indices of a tensor [B, T, HV, V]: it has the block's tokens and head alone."""
        layout = cute.make_layout((1, self.tokens, 1, self.wide), stride=(0, 2 * self.K + self.wide, 0, 1))
        return cute.make_tensor(sX.iterator + 2 * self.K, layout)
