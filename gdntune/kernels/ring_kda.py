"""Kimi Delta Attention of drafts behind a ring of corrections, token after token on CUDA cores.

The state is read once a call, and written only where the ring is folded into it. A ring keeps of
each accepted token that the state lacks its key k_i as it came, x_i = u_i / |k_i| and its decays,
one a key. With F_i the product of the decays behind entry i and R that of all, key by key,

    S <- R S + sum_i x_i (F_i k_i)^T

in registers, from where it is stored in a fold; then token after token as in `recurrent`, whose
block and threads it has: `tile_v` rows of V a block, RV rows by RK key positions a thread. It is
the one kernel on GPUs for KDA's contracts with a ring. F is formed by products from the newest
entry on, never by a quotient, so that nothing overflows at any gate.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, rounding, shuffles
from gdntune.kernels.decode import Operands, Options
from gdntune.kernels.recurrent import Recurrent
from gdntune.kernels.recurrent_parts import Block
from gdntune.kernels.recurrent_rows import widen
from gdntune.kernels.ring_call import Live, compiled

F32 = Float32
# what `recurrent` has beside: one way of each
FIXED = {
    "split": 1, "run": 0, "early": True, "fence": False, "spread": True, "heads": False, "row": False, "pdl": "none",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entries:
    """A head's ring in memory, k [rows, K], u [rows, V], decay [rows, K], and how many tokens are appended."""

    k: Any
    u: Any
    decay: Any
    live: Live
    appended: Any


@dataclasses.dataclass(frozen=True)
class Replay:
    """The ring in shared memory: F_i k_i [ring, K], x_i of the tile's rows [ring, tile_v], R [K]."""

    k: Any
    u: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """Where the state goes where the ring is folded: the slot's head. at: these two; seed [2]: to round it at random, else None."""

    state: Any
    folds: Any
    at: Any
    seed: Any


class RingKDA(Recurrent):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        # a loop over the tokens of any call: also of one
        super().__init__({**facts, "tokens": max(2, facts["tokens"])}, {**FIXED, **knobs})
        self.ring, self.u_dtype = facts["ring"], decode.DTYPES[facts["ring_dtype"]]
        self.at_random = facts["ring_rounding"] == "stochastic"
        self.keys_each = -(-self.K // self.threads)
        self.rows_each = -(-self.ring * self.tile_v // self.threads)

    @cute.jit
    def gated_delta_rule_ring(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, stream: CUstream,
    ):  # fmt: skip
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        A_shared = A_log.shape[0] != HV if const_expr(A_log is not None) else None
        dt_shared = dt_bias.shape[0] != HV if const_expr(dt_bias is not None) else None
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(ring_k, 3, None), self.view(ring_u, 3, None), self.view(ring_decay, 3, None),
            self.view(ring_base, 1), self.view(ring_count, 1), flush_min, append,
            heads, state.shape[0], q.shape[1], ring_u.shape[2], A_shared, dt_shared, ring_seed,
        ).launch(
            grid=(self.V // self.tile_v, HV, output.shape[0]), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident else None,
        )  # fmt: skip

    @cute.jit
    def load_keys(self, e: Entries, tid):
        """Issues the loads of a thread's keys of all entries, and of their decays."""
        k = cute.make_rmem_tensor((self.keys_each * self.ring,), e.k.element_type)
        d = cute.make_rmem_tensor((self.keys_each * self.ring,), F32)
        k.fill(0.0)
        d.fill(1.0)
        for m in cutlass.range_constexpr(self.keys_each):
            key = cutlass.min(tid + m * self.threads, self.K - 1)
            for i in cutlass.range_constexpr(self.ring):
                if i < e.live.count:
                    row = e.live.place(i)
                    k[m * self.ring + i] = e.k[row, key]
                    d[m * self.ring + i] = e.decay[row, key]
        return k, d

    @cute.jit
    def load_corrections(self, e: Entries, v0, tid):
        """Issues the loads of a thread's share of x: entry by entry, the tile's rows side by side."""
        x = cute.make_rmem_tensor((self.rows_each,), self.u_dtype)
        x.fill(0.0)
        for m in cutlass.range_constexpr(self.rows_each):
            at = tid + m * self.threads
            if at // self.tile_v < e.live.count:
                x[m] = e.u[e.live.place(at // self.tile_v), v0 + at % self.tile_v]
        return x

    @cute.jit
    def fill_replay(self, keys, u, to: Replay, tid):
        """What was asked for to shared memory, the keys times what decays behind them."""
        k, d = keys
        for m in cutlass.range_constexpr(self.keys_each):
            key = tid + m * self.threads
            if key < self.K:
                behind = F32(1.0)
                for back in cutlass.range_constexpr(self.ring):
                    i = const_expr(self.ring - 1 - back)
                    to.k[i, key] = k[m * self.ring + i].to(F32) * behind
                    behind = behind * d[m * self.ring + i]
                to.total[key] = behind
        for m in cutlass.range_constexpr(self.rows_each):
            at = tid + m * self.threads
            if at < self.ring * self.tile_v:
                to.u[at // self.tile_v, at % self.tile_v] = u[m].to(F32)

    @cute.jit
    def add_inverse_norms(self, stage, read, options, length, tid):
        """1 / |k| of the tokens, beside what `write_stage` writes: corrections are kept over it."""
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < length:
                sk = F32(0.0)
                for j in cutlass.range_constexpr(self.K // 32):
                    sk += read.k[r, j].to(F32) * read.k[r, j].to(F32)
                (sk,) = shuffles.sums((sk,))
                _, ik = self.norms(sk, sk, options.scale, options.use_qk_l2norm)
                if tid % 32 == 0:
                    stage.scalars[t, 3] = ik

    @cute.jit
    def append_keys(self, read, stage, e: Entries, first_of_head, tid):
        """The call's keys, of the first value head of theirs, and its decays to the ring."""
        W = const_expr(self.K // 32)
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < e.appended:
                row = e.live.place(e.live.count + t)
                at = tid % 32
                if first_of_head:
                    cute.autovec_copy(read.k[r, None], cute.local_tile(e.k[row, None], (W,), (at,)))
                own = cute.make_rmem_tensor((W,), F32)
                # this warp wrote them
                cute.autovec_copy(cute.local_tile(stage.g[t, None], (W,), (at,)), own)
                cute.autovec_copy(own, cute.local_tile(e.decay[row, None], (W,), (at,)))

    @cute.jit
    def fold(self, fh, replay: Replay, fk, count, row, lane):
        """fh <- R fh + sum_i x_i (F_i k_i)^T of a thread's rows, the first of which is the tile's row-th."""
        self.read_key(replay.total, fk, lane)
        self.decay_keys(fh, fk)
        x = cute.make_rmem_tensor((self.RV,), F32)
        for e in cutlass.range(count, unroll=2):
            self.read_key(replay.k[e, None], fk, lane)
            cute.autovec_copy(cute.local_tile(replay.u[e, None], (self.RV,), (row // self.RV,)), x)
            self.add_outer(fh, x, fk)

    def flat(self, x):
        """A fragment's registers one after the other."""
        return cute.make_tensor(x.iterator, cute.make_layout((self.RV * self.RK,)))

    @cute.jit
    def store_folded(self, goal: Goal, fh, row0, lane):
        """Rounds a thread's fp32 state and writes it to the head's state."""
        if const_expr(self.at_random):
            n, each = const_expr(self.RV * self.RK), const_expr(rounding.EACH)
            raw = self.fragment(self.state_dtype)
            # of a row's first thread the counters of n elements, then of the next one's
            counter = (row0 * self.shares + lane) * (n // each)
            some = cute.make_rmem_tensor((each,), F32)
            for first in cutlass.range_constexpr(0, n, each):
                words = rounding.philox(counter + first // each, *goal.at, goal.seed)
                # as they lie in registers; fh goes on as it is
                for e in cutlass.range_constexpr(each):
                    some[e] = self.flat(fh)[first + e]
                rounding.at_random(some, words, self.state_dtype)
                for e in cutlass.range_constexpr(each):
                    self.flat(raw)[first + e] = some[e].to(self.state_dtype)
            self.copy_rows(goal.state, raw, row0, lane, True)
        else:
            self.store_rows(goal.state, fh, F32(1.0), row0, lane)

    @cute.jit
    def token(self, fh, rv, token, inverse, unit, thread, o, kept, keeps):
        """One token on the elements in fh, as `advance`; its corrections over |k| to `kept`, if it `keeps` them."""
        fq, fk, fg, _, beta, kq = token
        self.decay_keys(fh, fg)
        sums = cute.make_rmem_tensor((2 * self.RV,), F32)
        self.both_sums(fh, fq, fk, sums)
        self.reduce(sums, self.RV, 2 * self.RV, None, 0, thread)
        ro = cute.make_rmem_tensor((self.own,), o.element_type)
        ru = cute.make_rmem_tensor((self.own,), self.u_dtype)
        wo = cute.make_rmem_tensor((self.own,), F32)
        for i in cutlass.range_constexpr(self.own):
            u = (rv[i].to(F32) - sums[2 * i]) * beta
            ro[i] = (sums[2 * i + 1] + u * kq).to(o.element_type)
            ru[i] = (u * inverse).to(self.u_dtype)
            wo[i] = u
        w = cute.make_rmem_tensor((self.RV,), F32)
        self.hand_round(wo, w, thread.home)
        self.add_outer(fh, w, fk)
        if thread.lane % self.alike == 0:
            cute.autovec_copy(ro, cute.local_tile(o, (self.own,), (unit,)))
            if keeps:
                cute.autovec_copy(ru, cute.local_tile(kept, (self.own,), (unit,)))

    @cute.jit
    def run_rows(
        self, x, options, block, thread, raw, source, stage, replay: Replay, e: Entries, goal: Goal
    ):
        """The tile, a chunk of rows after another: the next one is on its way meanwhile."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        # rolled, as in `recurrent`
        for it in cutlass.range(self.chunks, unroll=1):
            row = it * self.chunk + thread.group * self.RV
            row0 = block.v0 + row
            unit = self.unit(block.vt, it, thread)
            fh = self.fragment(F32)
            rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
            widen(raw, fh, True)
            if const_expr(self.chunks > 1):
                following = row0 + self.chunk
                if it + 1 < self.chunks:
                    self.copy_rows(source, raw, following, thread.lane, False)
            self.fold(fh, replay, fk, e.live.count, row, thread.lane)
            if goal.folds:
                self.store_folded(goal, fh, row0, thread.lane)
            for t in cutlass.range(block.length, unroll=1):
                self.read_key(stage.q[t, None], fq, thread.lane)
                self.read_key(stage.k[t, None], fk, thread.lane)
                self.read_key(stage.g[t, None], fg, thread.lane)
                self.read_values(stage.v[t, None], rw, self.unit(0, it, thread))
                token = (fq, fk, fg, F32(1.0), stage.scalars[t, 1], stage.scalars[t, 2])
                o = x.output[block.ni, t, block.hv, None]
                kept = e.u[e.live.place(e.live.count + t), None]
                self.token(
                    fh, rw, token, stage.scalars[t, 3], unit, thread, o, kept, t < e.appended
                )

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        heads: cute.FastDivmodDivisorV2, slots: Int32, tokens: Int32, ring_rows: Int32, A_shared, dt_shared, ring_seed,
    ):  # fmt: skip
        x = Operands(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, None, None, None, None, output
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
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        lane, group = self.thread(tid)
        hq, within = divmod(hv, heads)
        thread = self.stand(tid, lane, group)
        slot, write_slot = self.slots_of(n, read_index, write_index, None, None, None)
        base = ring_base[n]
        count = ring_count[n]
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        block = Block(vt, vt * self.tile_v, hv, hq, n, n, Int32(0), tokens)
        gate = self.gate_of(x, A_shared, dt_shared, hq, hv, tid)
        read = self.read(x, block, thread)
        cute.arch.sync_warp()

        live, writes = self.named(slot, write_slot, slots, null_index)
        if live:
            source = state[Int64(slot), hv, None, None]
            raw = self.fragment(self.state_dtype)
            self.copy_rows(source, raw, block.v0 + thread.group * self.RV, thread.lane, False)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            window = Live.clamped(base, count, ring_rows, self.ring)
            e = Entries(
                ring_k[Int64(slot), Int64(hq), None, None], ring_u[Int64(slot), Int64(hv), None, None],
                ring_decay[Int64(slot), Int64(hv), None, None], window, cutlass.select_(append != 0, tokens, Int32(0)),
            )  # fmt: skip
            keys = self.load_keys(e, tid)
            u = self.load_corrections(e, block.v0, tid)
            cute.arch.sync_warp()

            smem = SmemAllocator()
            stage = self.shared_stage(smem, v.element_type)
            replay = Replay(
                smem.allocate_tensor(
                    F32, cute.make_layout((self.ring, self.K), stride=(self.K, 1)), 16
                ),
                smem.allocate_tensor(
                    F32, cute.make_layout((self.ring, self.tile_v), stride=(self.tile_v, 1)), 16
                ),
                smem.allocate_tensor(F32, cute.make_layout((self.K,)), 16),
            )
            self.write_stage(stage, read, dt_bias, gate, options, tokens, tid)
            self.add_inverse_norms(stage, read, options, tokens, tid)
            cute.arch.sync_warp()
            if vt == 0:
                self.append_keys(read, stage, e, within == 0, tid)
            self.fill_replay(keys, u, replay, tid)
            cute.arch.sync_threads()
            folds = window.count >= cutlass.min(flush_min, self.ring + 1 - tokens)
            goal = Goal(
                state[Int64(write_slot), hv, None, None],
                folds and writes,
                (hv, write_slot),
                ring_seed,
            )
            self.run_rows(x, options, block, thread, raw, source, stage, replay, e, goal)
        else:
            self.zero_rows(output, n, Int32(0), tokens, hv, block.v0, tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return compiled(RingKDA(facts, knobs), facts, options, prefix)
