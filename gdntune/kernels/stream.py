"""The floor: a kernel that loads and stores the bytes of a state and computes next to nothing.

Forms: read; read and write in place (`update`); and a copy for each of `steps` tokens besides
(`steps`). A block moves `tile` elements, a thread `ilp` loads of `vec` at a time. It is tuned over
its own launch shapes like any kernel: measured on an H100, 256 threads win at one request and 128 at
sixteen. `indexed`: over the slots that an index names, as a kernel with a pool has them; else over
those from 0 on.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Stream:
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        self.dtype = DTYPES[facts["state_dtype"]]
        self.update, self.steps = facts["update"], facts["steps"]
        self.tile, self.ilp, self.vec, self.threads, self.early, self.indexed, self.ahead = (
            knobs[n] for n in ("tile", "ilp", "vec", "threads", "early", "indexed", "ahead")
        )
        self.chunk = self.threads * self.vec * self.ilp
        self.chunks = self.tile // self.chunk

    @cute.jit
    def stream_state(self, state, slots, intermediate, factor: Float32, sink, stream: CUstream):
        grid = (state.shape[1] // self.tile, slots.shape[0], 1)
        self.kernel(
            state, slots if const_expr(self.indexed) else None, intermediate, factor, sink
        ).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)

    @cute.jit
    def load(self, row, raw, first, tid):
        for i in cutlass.range_constexpr(self.ilp):
            at = first // self.vec + i * self.threads + tid
            cute.autovec_copy(cute.local_tile(row, (self.vec,), (at,)), raw[i, None])

    @cute.jit
    def store(self, row, raw, first, tid):
        for i in cutlass.range_constexpr(self.ilp):
            at = first // self.vec + i * self.threads + tid
            cute.autovec_copy(raw[i, None], cute.local_tile(row, (self.vec,), (at,)))

    @cute.kernel
    def kernel(self, state, slots, intermediate, factor: Float32, sink):
        tid, _, _ = cute.arch.thread_idx()
        block, n, _ = cute.arch.block_idx()
        if const_expr(self.ahead):
            cute.arch.griddepcontrol_launch_dependents()
        row = state[Int64(slots[n] if const_expr(self.indexed) else n), None]
        layout = cute.make_layout((self.ilp, self.vec), stride=(self.vec, 1))
        raw = cute.make_rmem_tensor(layout, self.dtype)
        total = Float32(0.0)
        if const_expr(self.early):
            self.load(row, raw, block * self.tile, tid)
        for c in cutlass.range(self.chunks, unroll=1):
            first = block * self.tile + c * self.chunk
            if const_expr(not self.early):
                self.load(row, raw, first, tid)
            kept = cute.make_rmem_tensor(layout, self.dtype)
            for i in cutlass.range_constexpr(self.ilp):
                for j in cutlass.range_constexpr(self.vec):
                    # a factor known at run time only: the store of a value just loaded would be dropped
                    x = raw[i, j].to(Float32) * factor
                    kept[i, j] = x.to(self.dtype)
                    if const_expr(not self.update and not self.steps):
                        total += x
            if const_expr(self.early):
                if c + 1 < self.chunks:
                    self.load(row, raw, first + self.chunk, tid)
            if const_expr(self.update):
                self.store(row, kept, first, tid)
            if const_expr(self.steps):
                for t in cutlass.range(intermediate.shape[1], unroll=1):
                    self.store(intermediate[Int64(n), Int64(t), None], kept, first, tid)
        if const_expr(not self.update and not self.steps):
            # never true of real data; keeps the loads alive
            if total == Float32(123.456):
                sink[0] = total


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    kernel = Stream(facts, knobs)
    align = 16 // (kernel.dtype.width // 8)
    B, width = cute.sym_int(symbol="B"), cute.sym_int(symbol="elements", divisibility=knobs["tile"])
    state = make_fake_tensor(
        kernel.dtype,
        (cute.sym_int(), width),
        (cute.sym_int64(divisibility=align), 1),
        assumed_align=16,
    )
    intermediate = None
    if facts["steps"]:
        strides = (cute.sym_int64(divisibility=align), cute.sym_int64(divisibility=align), 1)
        intermediate = make_fake_tensor(
            kernel.dtype, (B, cute.sym_int(symbol="steps"), width), strides, assumed_align=16
        )
    slots = make_fake_tensor(Int32, (B,), (1,), assumed_align=4)
    sink = make_fake_tensor(Float32, (1,), (1,), assumed_align=4)
    kernel.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel.stream_state,
        state,
        slots,
        intermediate,
        Float32(1.0),
        sink,
        stream,
        options=f"--enable-tvm-ffi {options}",
    )
