"""The device code of `layer_parts`."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from layer_parts import CHANNELS, THREADS, WIDTH, V

from gdntune.kernels import gates

F32 = Float32
MANY = 1 << 24
WARPS = 4


def rows_of(x, leading):
    """The same memory by its leading dimensions and the elements behind, side by side."""
    stride = (*(x.stride[d] for d in range(leading)), 1)
    return cute.make_tensor(x.iterator, cute.make_layout((1,) * leading + (MANY,), stride=stride))


class Conv:
    """The convolution of a request's tokens: packed rows to y, and to the window's ring."""

    def __init__(self, pdl, tokens):
        self.pdl, self.tokens = pdl, tokens

    @cute.jit
    def conv_step(self, x, state, weight, position, index, y, stream: CUstream):
        self.kernel(
            rows_of(x, 2), rows_of(state, 2), rows_of(weight, 0), position, index, rows_of(y, 2), state.shape[1]
        ).launch(
            grid=(x.shape[2] // (CHANNELS * THREADS), x.shape[0], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x, state, weight, position, index, y, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bx, n, _ = cute.arch.block_idx()
        slot, place = index[n], position[n]
        cute.arch.sync_warp()
        at = bx * THREADS + tid
        rw = cute.make_rmem_tensor((WIDTH * CHANNELS,), BFloat16)
        rx = cute.make_rmem_tensor(
            cute.make_layout((self.tokens, CHANNELS), stride=(CHANNELS, 1)), BFloat16
        )
        rr = cute.make_rmem_tensor(
            cute.make_layout((WIDTH - 1, CHANNELS), stride=(CHANNELS, 1)), BFloat16
        )
        cute.autovec_copy(cute.local_tile(weight, (WIDTH * CHANNELS,), (at,)), rw)
        if const_expr(not self.pdl):
            self.read_new(x, n, at, rx)
        cute.arch.sync_warp()
        if slot >= 0:
            for j in cutlass.range_constexpr(WIDTH - 1):
                row = place + (j + 1 - WIDTH)
                row = cutlass.select_(row < 0, row + rows, row)
                cute.autovec_copy(
                    cute.local_tile(state[Int64(slot), row, None], (CHANNELS,), (at,)), rr[j, None]
                )
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.read_new(x, n, at, rx)
        if slot >= 0:
            for t in cutlass.range_constexpr(self.tokens):
                ry = cute.make_rmem_tensor((CHANNELS,), BFloat16)
                for i in cutlass.range_constexpr(CHANNELS):
                    s = rx[t, i].to(F32) * rw[WIDTH * i + WIDTH - 1].to(F32)
                    for j in cutlass.range_constexpr(WIDTH - 1):
                        old = (
                            rr[t + j, i]
                            if const_expr(t + j < WIDTH - 1)
                            else rx[t + j + 1 - WIDTH, i]
                        )
                        s += old.to(F32) * rw[WIDTH * i + j].to(F32)
                    ry[i] = (s * gates.sigmoid(s)).to(BFloat16)
                cute.autovec_copy(ry, cute.local_tile(y[n, t, None], (CHANNELS,), (at,)))
                row = place + t
                row = cutlass.select_(row >= rows, row - rows, row)
                cute.autovec_copy(
                    rx[t, None], cute.local_tile(state[Int64(slot), row, None], (CHANNELS,), (at,))
                )

    @cute.jit
    def read_new(self, x, n, at, rx):
        for t in cutlass.range_constexpr(self.tokens):
            cute.autovec_copy(cute.local_tile(x[n, t, None], (CHANNELS,), (at,)), rx[t, None])


class Norm:
    """The gated norm of bf16 rows: a warp a row."""

    def __init__(self, pdl):
        self.pdl = pdl

    @cute.jit
    def norm_step(self, o, z, weight, out, eps: Float32, stream: CUstream):
        rows = o.shape[0] * o.shape[1] * o.shape[2]
        self.kernel(rows_of(o, 0), rows_of(z, 0), weight, rows_of(out, 0), eps).launch(
            grid=(rows // WARPS, 1, 1), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, o, z, weight, out, eps: Float32):
        tid, _, _ = cute.arch.thread_idx()
        bx, _, _ = cute.arch.block_idx()
        L = const_expr(V // 32)
        at, wl = bx * WARPS * 32 + tid, tid % 32
        rw = cute.make_rmem_tensor((L,), F32)
        rz = cute.make_rmem_tensor((L,), BFloat16)
        ro = cute.make_rmem_tensor((L,), BFloat16)
        cute.autovec_copy(cute.local_tile(weight, (L,), (wl,)), rw)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        cute.autovec_copy(cute.local_tile(o, (L,), (at,)), ro)
        cute.autovec_copy(cute.local_tile(z, (L,), (at,)), rz)
        squares = F32(0.0)
        for i in cutlass.range_constexpr(L):
            squares += ro[i].to(F32) * ro[i].to(F32)
        for s in cutlass.range_constexpr(5):
            squares += cute.arch.shuffle_sync_bfly(
                squares, offset=16 >> s, mask=-1, mask_and_clamp=31
            )
        rstd = cute.math.rsqrt(squares * F32(1.0 / V) + eps, fastmath=True)
        y = cute.make_rmem_tensor((L,), BFloat16)
        for i in cutlass.range_constexpr(L):
            gate = rz[i].to(F32)
            y[i] = (ro[i].to(F32) * rstd * rw[i] * gate * gates.sigmoid(gate)).to(BFloat16)
        cute.autovec_copy(y, cute.local_tile(out, (L,), (at,)))


class Producer:
    """Copies words, each after so many dependent steps, and lets the kernel behind it start at once."""

    @cute.jit
    def produce(self, source, target, steps: Int32, one: Int32, stream: CUstream):
        grid = (source.shape[0] // (CHANNELS * THREADS), 1, 1)
        self.kernel(rows_of(source, 0), rows_of(target, 0), steps, one).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source, target, steps: Int32, one: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        bx, _, _ = cute.arch.block_idx()
        r = cute.make_rmem_tensor((CHANNELS,), Int32)
        at = bx * THREADS + tid
        cute.autovec_copy(cute.local_tile(source, (CHANNELS,), (at,)), r)
        x = r[0]
        for _ in cutlass.range(steps, unroll=1):
            x = x * one
        r[0] = x
        cute.autovec_copy(r, cute.local_tile(target, (CHANNELS,), (at,)))


def compiled(part, tokens, pdl, options, prefix):
    """A part's compiled function."""

    def wide():
        return cute.sym_int64(divisibility=8)

    def fake(dtype, shape, strides):
        return make_fake_tensor(dtype, shape, strides, assumed_align=16)

    def index():
        return make_fake_tensor(Int32, (B,), (1,), assumed_align=4)

    B, T, HV, D = (cute.sym_int(symbol=n) for n in ("B", "T", "HV", "D"))
    if part == "part_conv":
        kernel = Conv(pdl, tokens)
        row = lambda: fake(BFloat16, (B, tokens, D), (wide(), wide(), 1))  # noqa: E731
        state = fake(BFloat16, (cute.sym_int(), cute.sym_int(), D), (wide(), wide(), 1))
        given = [row(), state, fake(BFloat16, (D, WIDTH), (WIDTH, 1)), index(), index(), row()]
        function = kernel.conv_step
    elif part == "part_producer":
        kernel = Producer()
        n = cute.sym_int(divisibility=CHANNELS * THREADS)
        words = [fake(Int32, (n,), (1,)) for _ in range(2)]
        given, function = [*words, Int32(1), Int32(1)], kernel.produce
    else:
        kernel = Norm(pdl)
        rows = lambda: fake(BFloat16, (B, T, HV, V), (wide(), wide(), V, 1))  # noqa: E731
        given = [rows(), rows(), fake(F32, (V,), (1,)), rows(), F32(1.0)]
        function = kernel.norm_step
    kernel.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(function, *given, stream, options=f"--enable-tvm-ffi {options}")
