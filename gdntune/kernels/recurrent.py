"""Gated delta rule decode, GDN and KDA, token after token on CUDA cores.

    S <- decay S;   u <- beta (v - S k);   o <- S q + u (k.q);   S <- S + u k^T

S is [V, K], q and k are normalised, q is scaled: the rule of Gated DeltaNet (arXiv 2412.06464) and,
with a decay a key, of Kimi Linear (arXiv 2510.26692), with the output taken before the update.
A block has `tile_v` rows of V of one head of one request. A thread holds RV of them by RK key
positions in fp32, and `lanes` threads share a row and sum S k and S q by butterflies. It serves
every contract. On an H200 it is the fastest at one token, where states between tokens are written,
and at up to five tokens with fp32 states that are rewritten; elsewhere `wy_block` overtakes it.

With `spread` each step of a butterfly halves the rows too, so that a thread ends with the sums of
`own` rows, computes their u and output alone, and hands u round: half the instructions of the sums,
and one wait more. k_last reads vectors along K, v_last along V; the arithmetic between is the same.
T = 1 is straight-line code, T >= 2 a loop at run time over a state that stays in registers.

`recurrent_tokens` reads tokens, `recurrent_rows` has the state and one token's arithmetic; here are
the two bodies and what a block does.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode
from gdntune.kernels.recurrent_parts import Block, Kept, Token
from gdntune.kernels.recurrent_rows import widen
from gdntune.kernels.recurrent_tokens import RecurrentTokens

F32 = Float32


class Recurrent(RecurrentTokens):
    """The compile-time facts of one object."""

    @cute.jit
    def one_token(
        self, x, options, block, thread, gate, read, kept, source, raw, write_slot, writes
    ):
        """T = 1, straight-line but for the chunks of rows."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        decay = F32(1.0)
        beta = F32(1.0)
        kq = F32(0.0)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        sD = None
        if const_expr(self.per_k):
            shape, stride = (self.warps, self.K), (self.K, 1)
            sD = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)[
                thread.tid // 32, None
            ]
        if const_expr(self.fence):
            # Always true, which the compiler cannot know: arithmetic does not move across a branch.
            if options.beta_scale != F32(0.0):
                decay, beta = self.use_token(read, gate, options, sD, fq, fk, fg, thread)
                kq = self.normalise(fq, fk, options, thread, sR)
        else:
            decay, beta = self.use_token(read, gate, options, sD, fq, fk, fg, thread)
        v = x.v[block.ni, block.t0, block.hv, None]
        # rolled: unrolled over four chunks of a large tile one variant took 2.1 s to compile instead of 0.5
        for it in cutlass.range(self.chunks, unroll=1):
            row0 = block.v0 + it * self.chunk + thread.group * self.RV
            unit = self.unit(block.vt, it, thread)
            if const_expr(not self.early):
                self.copy_rows(source, raw, row0, thread.lane, False)
                if const_expr(self.chunks > 1):
                    self.read_values(v, read.v, unit)
            fh = self.fragment(F32)
            rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
            for i in cutlass.range_constexpr(self.own):
                rw[i] = read.v[i]
            widen(raw, fh, self.spread)
            if const_expr(self.early and self.chunks > 1):
                if it + 1 < self.chunks:
                    self.copy_rows(source, raw, row0 + self.chunk, thread.lane, False)
                    self.read_values(v, read.v, self.unit(block.vt, it + 1, thread))
            token = Token(fq, fk, fg, decay, beta, kq)
            o = x.output[block.ni, block.t0, block.hv, None]
            scaled = self.advance(fh, rw, token, F32(1.0), options, row0, unit, thread, sR, 0, o)
            self.keep_state(x, kept, options.null_index, block, 0, fh, scaled, row0, thread.lane)
            if const_expr(self.update):
                if writes:
                    self.store_rows(
                        x.state[Int64(write_slot), block.hv, None, None],
                        fh,
                        scaled,
                        row0,
                        thread.lane,
                    )

    @cute.jit
    def many_tokens(
        self, x, options, block, thread, gate, read, kept, source, raw, write_slot, writes
    ):
        """T >= 2: the block's tokens go to shared memory once, and the state of a chunk of rows over them in a loop."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        stage = self.shared_stage(smem, x.v.element_type)
        if const_expr(self.fence):
            # as for one token
            if options.beta_scale != F32(0.0):
                self.write_stage(stage, read, x.dt_bias, gate, options, block.length, thread.tid)
        else:
            self.write_stage(stage, read, x.dt_bias, gate, options, block.length, thread.tid)
        cute.arch.sync_threads()
        # rolled, as for one token
        for it in cutlass.range(self.chunks, unroll=1):
            row0 = block.v0 + it * self.chunk + thread.group * self.RV
            unit = self.unit(block.vt, it, thread)
            if const_expr(not self.early):
                self.copy_rows(source, raw, row0, thread.lane, False)
            fh = self.fragment(F32)
            rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
            widen(raw, fh, self.spread)
            if const_expr(self.early and self.chunks > 1):
                if it + 1 < self.chunks:
                    self.copy_rows(source, raw, row0 + self.chunk, thread.lane, False)
            scaled = F32(1.0)
            for t in cutlass.range(block.length, unroll=1):
                self.read_key(stage.q[t, None], fq, thread.lane)
                self.read_key(stage.k[t, None], fk, thread.lane)
                if const_expr(self.per_k):
                    self.read_key(stage.g[t, None], fg, thread.lane)
                token = Token(
                    fq, fk, fg, stage.scalars[t, 0], stage.scalars[t, 1], stage.scalars[t, 2]
                )
                self.read_values(stage.v[t, None], rw, self.unit(0, it, thread))
                o = x.output[block.ni, block.t0 + t, block.hv, None]
                scaled = self.advance(
                    fh, rw, token, scaled, options, row0, unit, thread, sR, t % 2, o
                )
                self.keep_state(
                    x, kept, options.null_index, block, t, fh, scaled, row0, thread.lane
                )
            if const_expr(self.update):
                if writes:
                    self.store_rows(
                        x.state[Int64(write_slot), block.hv, None, None],
                        fh,
                        scaled,
                        row0,
                        thread.lane,
                    )

    @cute.jit
    def keep_state(self, x, kept, null_index: Int32, block, t, fh, scaled: Float32, row0, lane):
        """Writes the state after token t to its place among the intermediate states, where the contract has them."""
        if const_expr(self.intermediate == "slots"):
            # a ragged request may have more tokens than there are columns
            if t < kept.columns:
                if const_expr(self.row):
                    slot = self.of_row(kept.row_slots, Int32(t))
                else:
                    slot = x.slot_index[block.n, t]
                if slot >= 0 and slot < kept.slots and slot != null_index:
                    self.store_rows(
                        x.state[Int64(slot), block.hv, None, None], fh, scaled, row0, lane
                    )
        elif const_expr(self.intermediate != "none"):
            if kept.keeps and t < kept.steps:
                self.store_rows(
                    x.intermediate[kept.row, Int64(t), block.hv, None, None], fh, scaled, row0, lane
                )

    @cute.jit
    def work(self, x, options, sizes):
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        lane, group = self.thread(tid)
        hq, _ = divmod(hv, sizes.heads)
        thread = self.stand(tid, lane, group)

        self.await_producer("first")
        asked = self.ask_slots(n, tid % 32, x, sizes.columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, x.cu_seqlens, sizes.tokens)

        # What does not hang on the slot is loaded while the slot's index is on its way: at small batches each is a wait for memory.
        block = Block(vt, vt * self.tile_v, hv, hq, n, ni, t0, length)
        gate = self.gate_of(x, sizes.A_shared, sizes.dt_shared, hq, hv, tid)
        read = self.read(x, block, thread) if const_expr(self.pdl != "state") else None
        # Loads do not move across this; without it the compiler sinks them below the branch (0.08 us at B=1 on an H100).
        cute.arch.sync_warp()

        slot = self.start_of(asked, n, x.slot_index, sizes.columns)
        live, writes = self.named(slot, asked.write_slot, sizes.slots, options.null_index)
        row, keeps = self.kept_row(n, live, x.slot_index, sizes.rows, options.null_index)
        kept = Kept(sizes.slots, sizes.columns, sizes.steps, row, keeps, asked.row)

        if live:
            source = x.state[Int64(slot), hv, None, None]
            raw = self.fragment(self.state_dtype)
            if const_expr(self.early):
                self.copy_rows(source, raw, block.v0 + thread.group * self.RV, thread.lane, False)
                if const_expr(self.per_k and not self.loop and not self.fence):
                    # the gates' arithmetic does not move across this: it would wait for g before the state is asked for
                    cute.arch.sync_warp()
            body = self.many_tokens if const_expr(self.loop) else self.one_token
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                late = self.read(x, block, thread)
                # as above
                cute.arch.sync_warp()
                body(
                    x,
                    options,
                    block,
                    thread,
                    gate,
                    late,
                    kept,
                    source,
                    raw,
                    asked.write_slot,
                    writes,
                )
            else:
                body(
                    x,
                    options,
                    block,
                    thread,
                    gate,
                    read,
                    kept,
                    source,
                    raw,
                    asked.write_slot,
                    writes,
                )
        else:
            self.await_producer("state")
            self.zero_rows(x.output, ni, t0, length, hv, block.v0, tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(Recurrent(facts, knobs), facts, options, prefix)
