"""Gated delta rule decode of several tokens at once, GDN and KDA, on tensor cores, by blocks that work
together.

    P   = [k, q] S0^T                                      tensor cores, memory to operand
    u_t = beta_t (v_t - D_t P_k[t] - sum_(i<t) F[t, i] (k_i.k_t) u_i)    a thread a row of V
    o_t = D_t P_q[t] + sum_(i<=t) F[t, i] (k_i.q_t) u_i
    S_T = D_T S0 + sum_i F[T, i] u_i k_i^T                 tensor cores, if the state is kept

S0 is the state before the call [V, K], F[t, i] the product of the decays of tokens i+1..t, D[t] that
of all up to t: `wy`'s form, with decays a key for KDA. What depends on q, k and the gates alone is
computed once a block into shared memory (`wy_block_gdn`, `wy_block_kda`); each warp owns rows of V
and all of K, `rows` at a time. On an H200 it is the fastest from three tokens on with bf16 states, and
at eight with fp32 ones, where no states between tokens are written and there is more than a request
or two. Operands are bf16, sums fp32: what is wider than bf16 is a sum of bf16 terms, or, by a knob,
of TF32 ones.

What terms lose. A bf16 number has 8 bits, so one term leaves at most 2^-8 of x, two leave 2^-17,
three 2^-26. Of u k, u and KDA's decayed key in two terms each, that is 2^-16 |u k|. The tolerance
for one token is 2^-18 (|S| + 2 rms of S's row), S = D S0 + u k, and a bf16 state shows it where S
lies next to the middle between two bf16 numbers. So two terms can fail, and most where D S0 and u k
nearly cancel; in three terms, of whose products those of orders 0 to 2 are summed, at most
2^-24 |u k| is lost, as by fp32 itself. The tolerance grows with the tokens that a place has seen, so
that D k and D q have three terms for the first two tokens alone: at the third it is 1.5 times what
two terms leave at most.

`wy_block_rows` has the state up to P, `wy_block_final` the final state; here are a row's solution
and what a block does.
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode
from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block_final import BlockFinal
from gdntune.kernels.wy_block_gdn import CHUNK
from gdntune.kernels.wy_operands import Operands, allocate

F32 = Float32


@dataclasses.dataclass(frozen=True)
class Span:
    """Which tokens a request has: row of q, first token there, how many."""

    row: Any
    first: Any
    length: Any
    ragged: bool

    def has(self, t):
        """Whether to read token t: of a request that is not ragged, always."""
        return t < self.length if self.ragged else True

    def token(self, t):
        """Where token t lies; the last one for those that are missing."""
        return self.first + (t if self.ragged else cutlass.min(t, self.length - 1))

    def piece(self, x, t, head, n: int, at):
        """Elements n * at to n * at + n of a head's vector of token t of a tensor [B, T, heads, elements]."""
        return cute.local_tile(x[self.row, self.token(t), head, None], (n,), (at,))


class Near(Span):
    """The same by fewer instructions: a token's address is that of the request's first one and so many steps, not negative, where a
    general index is seven instructions of 64 bits a token, all of them ahead of the state's loads.
    """

    def piece(self, x, t, head, n: int, at):
        first = cute.local_tile(x[self.row, self.first, head, None], (n,), (at,))
        t = t if self.ragged else cutlass.min(t, self.length - 1)
        step = Int64(x.stride[1]) * Int64(x.element_type.width // 8)
        address = first.iterator.toint() + Int64(Uint32(t)) * step
        pointer = cute.make_ptr(
            x.element_type, address, cute.AddressSpace.gmem, assumed_align=first.iterator.alignment
        )
        return cute.make_tensor(pointer, first.layout)


class Inputs(NamedTuple):
    """What the tokens bring, as it comes: the stage's share, a token's gate and beta a lane, pieces of v."""

    keys: Any
    gate: Any
    beta: Any
    values: Any


class WYBlock(BlockFinal):
    """The compile-time facts of one object."""

    def pieces(self, lane):
        """A lane's 16 bytes of what a warp's rows have of each token: number of the piece, token, place in the token's rows."""
        each = self.rows * self.passes // CHUNK
        for m in range(-(-self.tokens * each // 32)):
            at = m * 32 + lane
            yield m, at // each, at % each

    def there(self, t):
        """Whether a piece is one: of few rows there are fewer than lanes."""
        return (
            True if self.tokens * self.rows * self.passes % (32 * CHUNK) == 0 else t < self.tokens
        )

    @cute.jit
    def load_values(self, v, span, hv, row0, lane):
        """Issues the loads of a warp's rows of v, from row0 on."""
        each = const_expr(self.rows * self.passes // CHUNK)
        x = cute.make_rmem_tensor((-(-self.tokens * each // 32) * CHUNK,), v.element_type)
        x.fill(0)
        for m, t, at in self.pieces(lane):
            if self.there(t) and span.has(t):
                cute.autovec_copy(
                    span.piece(v, t, hv, CHUNK, row0 // CHUNK + at),
                    cute.local_tile(x, (CHUNK,), (m,)),
                )
        return x

    @cute.jit
    def keep_values(self, x, sV, lane):
        """What `load_values` asked for to a warp's shared memory."""
        for m, t, at in self.pieces(lane):
            if self.there(t):
                cute.autovec_copy(
                    cute.local_tile(x, (CHUNK,), (m,)),
                    cute.local_tile(sV[t, None], (CHUNK,), (at,)),
                )

    @cute.jit
    def store_outputs(self, sV, output, span, hv, row0, lane):
        """A warp's outputs, which are where v was."""
        for _, t, at in self.pieces(lane):
            if t < span.length:
                cute.autovec_copy(
                    cute.local_tile(sV[t, None], (CHUNK,), (at,)),
                    span.piece(output, t, hv, CHUNK, row0 // CHUNK + at),
                )

    @cute.jit
    def load_gates(self, a, b, span, hv, lane):
        """Lane t: token t's gate, where a head has one, and beta, as they came."""
        ga = F32(0.0)
        gb = F32(0.0)
        if const_expr(self.ragged):
            if lane < span.length:
                gb = b[span.row, span.first + lane, hv].to(F32)
                if const_expr(not self.per_k):
                    ga = a[span.row, span.first + lane, hv].to(F32)
        else:
            gb = b[span.row, span.token(lane), hv].to(F32)
            if const_expr(not self.per_k):
                ga = a[span.row, span.token(lane), hv].to(F32)
        return ga, gb

    @cute.jit
    def load_inputs(self, q, k, v, a, b, span, hq, hv, row0, th):
        """Issues the loads of what the tokens bring; row0: the warp's first row."""
        if const_expr(self.per_k):
            keys = self.stage.load(k, q, a, span, hq, hv, th)
        else:
            keys = self.stage.load(k, q, span, hq, th.tid)
        gate, beta = self.load_gates(a, b, span, hv, th.lane)
        return Inputs(keys, gate, beta, self.load_values(v, span, hv, row0, th.lane))

    @cute.jit
    def use_inputs(self, inputs, A, bias, o: Operands, sm, span, th, options):
        """What tokens brought to shared memory, as the stage has it; a lane's token's decay and beta."""
        there = th.lane < span.length
        beta = cutlass.select_(there, self.beta_of(inputs.beta, options.beta_scale), F32(0.0))
        decay = F32(1.0)
        if const_expr(self.per_k):
            self.stage.fill(inputs.keys, A, bias, o, span, th, options)
        else:
            decay = self.decay_of(inputs.gate, A, bias, options)
            decay = cutlass.select_(there, decay, F32(1.0))
            self.stage.fill(inputs.keys, o, th.tid)
        if th.warp < self.row_warps:
            self.keep_values(inputs.values, sm.v, th.lane)
        return decay, beta

    @cute.jit
    def solve(self, o: Operands, sm, first: cutlass.Constexpr, th):
        """A row of V a thread. With x_i = u_i / |k_i|: x_t = beta / |k_t| (v_t - (D_t P_k[t] + sum_(i<t) L[t, i] x_i) / |k_t|)."""
        N = const_expr(self.shape.N)
        row = th.lane % self.rows
        values = cute.make_rmem_tensor((self.tokens,), sm.v.element_type)
        for t in cutlass.range_constexpr(self.tokens):
            values[t] = sm.v[t, first + row]
        p = cute.make_rmem_tensor((2 * N,), F32)
        cute.autovec_copy(cute.local_tile(sm.p[row, None], (2 * N,), (0,)), p)
        u = cute.make_rmem_tensor((N,), F32)
        line = cute.make_rmem_tensor((N,), F32)
        factors = cute.make_rmem_tensor((4,), F32)
        for t in cutlass.range_constexpr(self.tokens):
            cute.autovec_copy(o.factors[t, None], factors)
            x = p[t]
            y = p[N + t]
            if const_expr(not self.per_k):
                x = x * factors[3]
                y = y * factors[3]
            cute.autovec_copy(o.gram[0, t, None], line)
            for i in cutlass.range_constexpr(t):
                x = x + line[i] * u[i]
            u[t] = values[t].to(F32) * factors[0] - x * factors[1]
            cute.autovec_copy(o.gram[1, t, None], line)
            for i in cutlass.range_constexpr(t + 1):
                y = y + line[i] * u[i]
            p[N + t] = y * factors[2]
        if const_expr(self.update):
            self.keep_u(u, o, sm.u, row)
        results = cute.make_rmem_tensor((N,), sm.v.element_type)
        results.store(
            cute.make_tensor(p.iterator + N, cute.make_layout((N,))).load().to(sm.v.element_type)
        )
        # where a row is two lanes', both have read it
        cute.arch.sync_warp()
        if th.lane < self.rows:
            for t in cutlass.range_constexpr(self.tokens):
                sm.v[t, first + row] = results[t]

    @cute.jit
    def work(self, call, options, sizes):
        th = fr.Thread.here()
        vt, hv, n = self.place()
        hq, in_group = divmod(hv, sizes.heads)
        self.await_producer("first")
        slot, write_slot = self.slots_of(
            n, call.read_index, call.write_index, call.slot_index, call.accepted, sizes.columns
        )
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, call.cu_seqlens, sizes.tokens)
        span = Near(ni, t0, length, self.ragged)
        v0 = vt * self.tile_v
        row0 = v0 + cutlass.min(th.warp, self.row_warps - 1) * (self.rows * self.passes)

        # what does not hang on the slot is loaded while the slot's index is on its way
        A, bias, dh = self.head_gate(
            call.A_log, call.dt_bias, sizes.A_shared, sizes.dt_shared, hq, hv
        )
        if const_expr(self.per_k):
            bias = self.stage.bias(call.dt_bias, dh, th)
        early = None
        if const_expr(self.pdl != "state"):
            early = self.load_inputs(call.q, call.k, call.v, call.a, call.b, span, hq, hv, row0, th)
        cute.arch.sync_warp()

        live, writes = self.named(slot, write_slot, sizes.slots, options.null_index)
        if live:
            source = call.state[Int64(slot), hv, None, None]
            came = self.load_state(source, row0, th)
            if const_expr(self.ahead is not None):
                later = self.ahead.request(n)
                later_slot = later
                if const_expr(self.pool):
                    later_slot = call.read_index[later]
                self.ahead.ask_tokens(
                    later, call.q, call.k, call.v, call.a, n, length, hq, in_group == 0, hv, v0, th
                )
            inputs = early
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                inputs = self.load_inputs(
                    call.q, call.k, call.v, call.a, call.b, span, hq, hv, row0, th
                )
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            smem = SmemAllocator()
            o = allocate(smem, self.shape, self.per_k, self.update, call.k.element_type)
            sm = self.rows_memory(smem, o, th.warp, call.v.element_type)
            decay, beta = F32(1.0), F32(0.0)
            if const_expr(self.fence):
                # Always so, which the compiler cannot know: ptxas moves arithmetic across a warp's
                # barrier, and not across a branch.
                if options.beta_scale != F32(0.0):
                    decay, beta = self.use_inputs(inputs, A, bias, o, sm, span, th, options)
            else:
                decay, beta = self.use_inputs(inputs, A, bias, o, sm, span, th, options)
            if const_expr(self.ahead is not None):
                # by now the index is there
                self.ahead.ask_state(
                    later, later_slot, call.state, n, hv, v0, sizes.slots, options.null_index, th
                )
            cute.arch.sync_threads()
            self.stage.combine(o, th, decay, beta, options.scale, options.use_qk_l2norm)
            for it in cutlass.range_constexpr(self.passes):
                first = row0 + it * self.rows
                raw = self.turned(came, th)
                p = self.project(raw, o, th)
                if const_expr(it == 0):
                    cute.arch.sync_threads()
                if const_expr(it + 1 < self.passes and self.tf32 is None):
                    came = self.load_state(source, first + self.rows, th)
                    cute.arch.sync_warp()
                if th.warp < self.row_warps:
                    self.write_projections(p, th, sm.p)
                    cute.arch.sync_warp()
                    self.solve(o, sm, it * self.rows, th)
                    cute.arch.sync_warp()
                    if const_expr(it + 1 == self.passes):
                        self.store_outputs(sm.v, call.output, span, hv, row0, th.lane)
                    if const_expr(it + 1 < self.passes and self.tf32 is not None):
                        # for their registers there is no room beside the solution's
                        came = self.load_state(source, first + self.rows, th)
                        cute.arch.sync_warp()
                    if const_expr(self.update and self.stores_early):
                        tile = call.state[Int64(write_slot), hv, None, None]
                        self.advance(raw, o, th, sm, (tile, first, writes))
                    elif const_expr(self.update):
                        self.advance(raw, o, th, sm)
                        if writes:
                            self.store_state(
                                raw, call.state[Int64(write_slot), hv, None, None], first, th
                            )
        else:
            self.await_producer("state")
            self.zero_rows(call.output, ni, t0, length, hv, v0, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(WYBlock(facts, knobs), facts, options, prefix)
