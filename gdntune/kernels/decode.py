"""What decode kernels share: the arguments and their layouts, the launch, which slot and which tokens a block works on.

A block works on `tile_v` rows of V of one value head of one request: grid (V / tile_v, HV, B), or (HV, V / tile_v, B).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from gdntune.kernels import gates, shuffles

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
F32 = Float32
EPSILON = 1e-6
# of a multiprocessor, sm_80 to sm_120
REGISTERS = 65536


class Operands(NamedTuple):
    """A call's tensors, by the calling convention of kernels; None what the contract lacks."""

    state: Any
    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    read_index: Any
    write_index: Any
    slot_index: Any
    accepted: Any
    cu_seqlens: Any
    intermediate: Any
    output: Any


class Options(NamedTuple):
    """A call's scalars."""

    scale: Any
    softplus_beta: Any
    threshold: Any
    lower_bound: Any
    beta_scale: Any
    null_index: Any
    use_qk_l2norm: Any


class Sizes(NamedTuple):
    """What a launch knows of a call's shapes; None what the contract lacks. heads: divides by the value heads of a q/k head. tokens: T, or
    a ragged call's rows. columns: of slot_index; rows, steps: of `intermediate`. A_shared, dt_shared: whether these are one a q/k head.
    """

    heads: Any
    slots: Any
    tokens: Any
    columns: Any
    rows: Any
    steps: Any
    A_shared: Any
    dt_shared: Any


class Asked(NamedTuple):
    """A request's slots on their way: to start from and for the final state; or, with `row`, its row of slots, one a lane, and the
    column to start from.
    """

    slot: Any
    write_slot: Any
    row: Any
    first: Any


class Decode:
    """The compile-time facts of a decode object; a kernel adds its knobs and `work(x, options, sizes)`, what a block does."""

    def __init__(
        self, facts: dict, tile_v: int, threads: int, registers: int = 0, heads_first: bool = False, pdl: str = "none"
    ):  # fmt: skip
        """registers: at most so many a thread; 0 leaves them to the compiler. heads_first: blocks that start one after another have
        the same rows of one head after another, not one head's rows. pdl: `none`; `first` or `state`: the kernel may start before
        the one ahead of it ends, and waits for it before its first load, or before the first after the state's.
        """
        self.K, self.V, self.tokens = facts["K"], facts["V"], facts["tokens"]
        self.k_last = facts["layout"] == "k_last"
        self.state_dtype = DTYPES[facts["state_dtype"]]
        self.gate, self.logit = facts["gate"], facts["beta"] == "logit"
        self.per_k = facts["op"] == "kda_decode"
        self.update, self.intermediate = facts["mode"] == "update", facts["intermediate"]
        self.accepted, self.pool, self.ragged = facts["accepted"], facts["pool"], facts["ragged"]
        self.loop = self.tokens > 1
        self.tile_v, self.threads, self.heads_first, self.pdl = tile_v, threads, heads_first, pdl
        # whether `ask_slots` reads a request's row of slots at once
        self.row = False
        # what caps registers is the number of blocks that a multiprocessor must have room for
        self.resident = REGISTERS // (threads * registers) if registers else 0

    @cute.jit
    def gated_delta_rule_decode(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, stream: CUstream,
    ):  # fmt: skip
        B = output.shape[0]
        if const_expr(self.ragged):
            B = cu_seqlens.shape[0] - 1
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        A_shared = A_log.shape[0] != HV if const_expr(A_log is not None and self.per_k) else None
        dt_shared = (
            dt_bias.shape[0] != HV if const_expr(dt_bias is not None and self.per_k) else None
        )
        slots = state.shape[0]
        tokens = q.shape[1] if const_expr(self.loop) else Int32(1)
        columns = slot_index.shape[1] if const_expr(self.intermediate == "slots") else None
        rows = intermediate.shape[0] if const_expr(intermediate is not None) else None
        steps = intermediate.shape[1] if const_expr(intermediate is not None) else None
        tiles = self.V // self.tile_v
        grid = (tiles, HV, B)
        if const_expr(self.heads_first):
            grid = (HV, tiles, B)
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(slot_index, 2, None), self.view(accepted, 1),
            self.view(cu_seqlens, 1), self.view(intermediate, 2), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm, heads,
            slots, tokens, columns, rows, steps, A_shared, dt_shared,
        ).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident else None,
            use_pdl=self.pdl != "none",
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        x = Operands(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output
        )  # fmt: skip
        options = Options(
            scale,
            softplus_beta,
            softplus_threshold,
            lower_bound,
            beta_scale,
            null_index,
            use_qk_l2norm,
        )
        self.work(
            x, options, Sizes(heads, slots, tokens, columns, rows, steps, A_shared, dt_shared)
        )

    @cute.jit
    def await_producer(self, place: cutlass.Constexpr):
        """Where `pdl` names this place: waits for the kernels ahead, then lets those behind start.

        In this order, so that what a later kernel finds running has itself waited for all before it.
        """
        if const_expr(self.pdl == place):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    def place(self):
        """A block's tile of V, value head and request."""
        x, y, n = cute.arch.block_idx()
        return (y, x, n) if self.heads_first else (x, y, n)

    def view(self, x, leading, tokens=1):
        """The same memory under a layout whose sizes are constants, so that a launch carries the pointer and the strides of the
        `leading` dimensions alone: 200 bytes of parameters, not 420. A cold kernel waits for them: 0.4 us at B=1 on an H100, with
        the 32-bit offsets of `fakes`.

        tokens: the dimension that T = 1 never moves along; None where it has none.
        """
        if x is None:
            return None
        leading = min(leading, len(x.shape))
        shape = (1,) * leading + tuple(n if isinstance(n, int) else 1 for n in x.shape[leading:])
        stride = tuple(
            0 if d == tokens and not self.loop else x.stride[d] for d in range(len(x.shape))
        )
        return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def norms(self, sq: Float32, sk: Float32, scale: Float32, use_qk_l2norm: Int32):
        """What q and k are multiplied by, from their sums of squares."""
        iq = scale
        ik = F32(1.0)
        if use_qk_l2norm != 0:
            iq = cute.math.rsqrt(sq + F32(EPSILON), fastmath=True) * scale
            ik = cute.math.rsqrt(sk + F32(EPSILON), fastmath=True)
        return iq, ik

    @cute.jit
    def decay_of(self, x, A, bias, options):
        """The decay of a head, or of one key of it, from what its gate is given as."""
        return gates.decay(
            self.gate, x, A, bias, options.softplus_beta, options.threshold, options.lower_bound
        )

    @cute.jit
    def beta_of(self, b, beta_scale: Float32):
        x = b.to(F32)
        if const_expr(self.logit):
            x = gates.sigmoid(x)
        return x * beta_scale

    @cute.jit
    def slots_of(self, n, read_index, write_index, slot_index, accepted, columns):
        """The slot to start from and the one that the final state goes to, as they are named."""
        slot = n
        if const_expr(self.intermediate == "slots"):
            column = Int32(0)
            if const_expr(self.accepted):
                column = cutlass.min(cutlass.max(accepted[n], 1), columns) - 1
            slot = slot_index[n, column]
        elif const_expr(self.pool):
            slot = read_index[n]
        write_slot = slot
        if const_expr(self.pool and self.update):
            write_slot = write_index[n]
        return slot, write_slot

    @cute.jit
    def ask_row(self, n, wl, slot_index, accepted, columns):
        """Issues the loads of `slots`: a request's row of slots, one a lane, and beside it the column to start from.

        A column that hangs on `accepted` is a second wait for memory before the state, and a slot asked for after each token one more
        before what follows it.
        """
        row = slot_index[n, cutlass.min(wl, columns - 1)]
        first = Int32(1)
        if const_expr(self.accepted):
            first = accepted[n]
        return row, first

    @cute.jit
    def ask_slots(self, n, wl, x, columns):
        """Issues the loads of the slots that a request names, by one lane or, with `row`, a row of them by the lanes wl of a warp."""
        row = None
        first = None
        if const_expr(self.row):
            row, first = self.ask_row(n, wl, x.slot_index, x.accepted, columns)
            slot = Int32(0)
            write_slot = x.write_index[n] if const_expr(self.pool and self.update) else slot
        else:
            slot, write_slot = self.slots_of(
                n, x.read_index, x.write_index, x.slot_index, x.accepted, columns
            )
        return Asked(slot, write_slot, row, first)

    @cute.jit
    def start_of(self, asked, n, slot_index, columns):
        """The slot to start from, of what `ask_slots` asked for."""
        slot = asked.slot
        if const_expr(self.row):
            slot = self.start_of_row(asked.row, asked.first, n, slot_index, columns)
        return slot

    @cute.jit
    def of_row(self, row, column):
        """A row's slot of a column below 32; all lanes take part."""
        return shuffles.at_lane(row, column)

    @cute.jit
    def start_of_row(self, row, first, n, slot_index, columns):
        """The slot to start from, of what `ask_row` asked for."""
        column = cutlass.min(cutlass.max(first, 1), columns) - 1
        slot = self.of_row(row, cutlass.min(column, 31))
        if column > 31:
            slot = slot_index[n, column]
        return slot

    @cute.jit
    def named(self, slot, write_slot, slots: Int32, null_index: Int32):
        """Whether a request starts from a slot, and whether its final state has one.

        An index outside the pool is padding too, so that no index reaches memory that is not the pool's.
        """
        live = slot >= 0
        if const_expr(self.pool):
            live = slot >= 0 and slot < slots and slot != null_index
        writes = live
        if const_expr(self.pool and self.update):
            writes = write_slot >= 0 and write_slot < slots and write_slot != null_index
        return live, writes

    @cute.jit
    def kept_row(self, n, live, slot_index, rows, null_index: Int32):
        """The row of `intermediate` for a request's states between tokens, and whether it has one."""
        row = Int64(n)
        keeps = live
        if const_expr(self.intermediate == "indexed"):
            at = slot_index[n]
            keeps = at >= 0 and at < rows and at != null_index
            row = Int64(at)
        return row, keeps

    @cute.jit
    def kept_at(self, t: cutlass.Constexpr, asked, row, keeps, length, sizes, null_index: Int32):
        """Of a kernel that reads slots by rows: the slot, or the row of `intermediate`, for the state after token t, and whether there is
        one; row, keeps: what `kept_row` gave.
        """
        to = row
        ok = keeps
        if const_expr(self.intermediate == "slots"):
            to = self.of_row(asked.row, Int32(t))
            ok = (
                t < sizes.columns
                and t < length
                and to >= 0
                and to < sizes.slots
                and to != null_index
            )
        elif const_expr(self.intermediate != "none"):
            ok = keeps and t < sizes.steps and t < length
        return to, ok

    def kept_head(self, state, intermediate, to, t: int, hv):
        """A head's state after token t, in memory, at what `kept_at` gave."""
        if self.intermediate == "slots":
            return state[Int64(to), hv, None, None]
        return intermediate[to, Int64(t), hv, None, None]

    @cute.jit
    def parameters(self, A_log, A_shared, dt_shared, hq, hv):
        """The head's row of A_log and of dt_bias: one a value head or, of KDA, one a q/k head."""
        ah = hv
        dh = hv
        if const_expr(A_log is not None and self.per_k):
            if A_shared:
                ah = hq
            if dt_shared:
                dh = hq
        return ah, dh

    @cute.jit
    def head_gate(self, A_log, dt_bias, A_shared, dt_shared, hq, hv):
        """Issues the loads of a head's A and bias, 0 where gates have none; of KDA, whose bias is one a key, gives its row of dt_bias."""
        ah, dh = self.parameters(A_log, A_shared, dt_shared, hq, hv)
        A = F32(0.0) if const_expr(A_log is None) else A_log[ah].to(F32)
        bias = F32(0.0) if const_expr(dt_bias is None or self.per_k) else dt_bias[dh].to(F32)
        return A, bias, dh

    @cute.jit
    def span_of(self, n, cu_seqlens, tokens: Int32):
        """Where a request's tokens lie, row of q and first token there, and how many there are."""
        ni = n
        t0 = Int32(0)
        length = tokens
        if const_expr(self.ragged):
            ni = Int32(0)
            t0 = cutlass.min(cutlass.max(cu_seqlens[n], 0), tokens)
            length = cutlass.max(
                cutlass.min(cutlass.min(cu_seqlens[n + 1], tokens) - t0, self.tokens), 0
            )
        return ni, t0, length

    @cute.jit
    def zero_rows(self, output, ni, t0, length, hv, v0, tid):
        """Padding's output rows are zero."""
        for e in cutlass.range(tid, length * self.tile_v, self.threads, unroll=1):
            output[ni, t0 + e // self.tile_v, hv, v0 + e % self.tile_v] = F32(0.0).to(
                output.element_type
            )


def fakes(facts: dict) -> list:
    """Stand-ins for the arguments: dtypes, ranks, tied sizes and what must be contiguous; None for what the contract lacks."""
    K, V = facts["K"], facts["V"]
    per_k, pool, ragged, kept = (
        facts["op"] == "kda_decode",
        facts["pool"],
        facts["ragged"],
        facts["intermediate"],
    )
    update = facts["mode"] == "update"
    x, s = DTYPES[facts["input_dtype"]], DTYPES[facts["state_dtype"]]
    a, b = DTYPES[facts["gate_dtype"]], DTYPES[facts["beta_dtype"]]
    # strides of pools and buffers are 64-bit: static or 32-bit ones wrap at slot 2048 of HV=64
    stride = cute.sym_int64
    B, H, HV, slots = (cute.sym_int(symbol=n) for n in ("B", "H", "HV", "slots"))
    N = cute.sym_int(symbol="one") if ragged else B
    T = cute.sym_int(symbol="T")
    tile = (V, K) if facts["layout"] == "k_last" else (K, V)
    e, x16 = 16 // (s.width // 8), 16 // (x.width // 8)

    def tensor(dtype, shape, strides, align):
        return make_fake_tensor(dtype, shape, strides, assumed_align=align)

    def index(*shape):
        return tensor(Int32, shape, tuple(cute.sym_int() for _ in shape), 4)

    def small(dtype, *shape):
        # Offsets of 32 bits save ten instructions before the first load, and these tensors have far less than 2^31 elements.
        return tensor(dtype, shape, tuple(cute.sym_int() for _ in shape), dtype.width // 8)

    def rows(dtype, heads, width, e16):
        return tensor(
            dtype,
            (N, T, heads, width),
            (stride(divisibility=e16), stride(divisibility=e16), width, 1),
            16,
        )

    state = tensor(
        s, (slots, HV, *tile), (stride(divisibility=e), tile[0] * tile[1], tile[1], 1), 16
    )
    if per_k:
        gate = rows(a, HV, K, 16 // (a.width // 8))
    else:
        gate = small(a, N, T, HV)
    beta = small(b, N, T, HV)
    A_log = dt_bias = None
    if facts["A_log_dtype"]:
        A, d = DTYPES[facts["A_log_dtype"]], DTYPES[facts["dt_bias_dtype"]]
        heads = cute.sym_int() if per_k else HV
        A_log = tensor(A, (heads,), (1,), A.width // 8)
        dt_bias = (
            tensor(d, (cute.sym_int(), K), (K, 1), 16)
            if per_k
            else tensor(d, (HV,), (1,), d.width // 8)
        )
    slot_index = None
    if kept == "indexed":
        slot_index = index(B)
    elif kept == "slots":
        slot_index = index(B, cute.sym_int())
    buffer = None
    if kept in ("dense", "indexed"):
        shape = (cute.sym_int(), cute.sym_int(), HV, *tile)
        buffer = tensor(
            s,
            shape,
            (stride(divisibility=e), stride(divisibility=e), tile[0] * tile[1], tile[1], 1),
            16,
        )
    return [
        state,
        rows(x, H, K, x16),
        rows(x, H, K, x16),
        rows(x, HV, V, x16),
        gate,
        beta,
        A_log,
        dt_bias,
        index(B) if pool and kept != "slots" else None,
        index(B) if pool and update else None,
        slot_index,
        index(B) if facts["accepted"] else None,
        index(cute.sym_int()) if ragged else None,
        buffer,
        rows(x, HV, V, x16),
    ]


# what a call's scalars are stood in for by: five fp32, null_index, use_qk_l2norm
SCALARS = (*[F32(1.0)] * 5, Int32(-1), Int32(1))


def made(kernel: Decode, entry, arguments, options: str, prefix: str):
    """`entry` compiled for stand-ins of its arguments and, behind them, a stream, for the architecture that CUTE_DSL_ARCH names;
    profilers show `prefix`.
    """
    kernel.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(entry, *arguments, stream, options=f"--enable-tvm-ffi {options}")


def compiled(kernel: Decode, facts: dict, options: str, prefix: str):
    """A decode kernel's compiled function, as `made` gives it."""
    return made(kernel, kernel.gated_delta_rule_decode, [*fakes(facts), *SCALARS], options, prefix)
