"""Gated delta rule decode of drafts behind a ring of corrections, GDN, on tensor cores.

A verified draft would write a state a token; here the state is read once a call, and written only
where the ring is folded into it. Instead a ring keeps of each accepted token that the state lacks
its key k_i as it came, x_i = u_i / |k_i| and its decay. A block has `rows` times `warps` rows of V
of one head, and its warps all of K. With L entries, F_i the product of the decays behind entry i
and R that of all,

    S_L = R S0 + sum_i F_i x_i k_i^T                 what the call starts from; formed in a fold alone
    P'  = S_L [k, q]^T = R S0 [k, q]^T + x (F G)^T   G = [k, q] k_ring^T
    y_t = beta_t / |k_t| (v_t - D_t P'_k[t] / |k_t|) a token's correction, were it alone in the call
    x   = W y,   o = D P'_q + C W y
    W   = (I + diag(beta / |k|^2) tril(k k^T, -1))^-1,   C = tril(q k^T), both with decays

It is the WY form of the delta rule (arXiv 2406.06484) with the ring's tokens as a chunk before the
call's. It is the kernel of contracts with a ring; GDN has no other on GPUs.

All rows of V are multiplied by the same F G, W and C W, which a block works out while the state is
on its way. What is left behind the state is a chain of products on tensor cores, rows of V by
tokens: sums of one lie in registers as the next one's operand does, so that nothing of a row meets
shared memory.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import fragments as fr
from gdntune.kernels.decode import Options
from gdntune.kernels.ring_call import compiled
from gdntune.kernels.ring_rows import Chance
from gdntune.kernels.ring_tokens import MATRIX, RingTokens
from gdntune.kernels.ring_window import Corrected
from gdntune.kernels.wy_block import Span
from gdntune.kernels.wy_operands import allocate, matrix

F32, BF = Float32, BFloat16


@dataclasses.dataclass(frozen=True)
class Mine:
    """What a warp's rows are read from and written to: a head's states, whether it is folded, corrections u [rows, V] with their window
    and how many are kept, v, and the output [T, V] with how many tokens it has.
    """

    source: Any
    goal: Any
    folds: Any
    u: Any
    live: Any
    appended: Any
    v: Any
    hv: Any
    span: Any
    out: Any
    tokens: Any
    chance: Any


class Ring(RingTokens):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.late, self.ahead = knobs["late"], knobs["prefetch"]

    @cute.jit
    def gated_delta_rule_ring(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, stream: CUstream,
    ):  # fmt: skip
        self.launch(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min, append, ring_seed, None, None, None, stream,
        )  # fmt: skip

    @cute.jit
    def launch(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, output_gate, norm_weight, norm_eps, stream: CUstream,
    ):  # fmt: skip
        """The last three: what `ring_norm` has beside a ring; None here."""
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        tiles = self.V // self.tile_v
        later = None
        if const_expr(self.ahead > 0):
            later = cutlass.max(self.ahead // (HV * tiles), 1)
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(ring_k, 3, None), self.view(ring_u, 3, None), self.view(ring_decay, 3, None),
            self.view(ring_base, 1), self.view(ring_count, 1), flush_min, append,
            heads, state.shape[0], q.shape[1], ring_u.shape[2], ring_seed, later,
            self.view(output_gate, 2), norm_weight, norm_eps,
        ).launch(
            grid=(tiles, HV, output.shape[0]), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident or self.shared else None,
        )  # fmt: skip

    def ask_rest(self, output_gate, norm_weight, norm_eps, n, hv, tokens, th):
        """Issues the loads for what comes behind the delta rule: here nothing does."""
        return None

    def outputs_of(self, smem, output, n, hv):
        """Where a head's outputs [T, V] go: to memory at once."""
        return output[n, None, hv, None]

    def finish(self, rest, rows, output, th):
        """What comes behind the delta rule, of a head's outputs in `rows`: here nothing."""

    @cute.jit
    def run_rows(self, o, matrices, parts, x, mine, came, values, row0, th):
        """A warp's rows, `rows` at a time: the next ones are on their way while these are worked on."""
        found = None
        for it in cutlass.range_constexpr(self.passes):
            first = row0 + it * self.rows
            raw = came
            if const_expr(self.shared):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
            else:
                raw = self.turned(came)
            p = self.project(raw, o, th)
            if const_expr(it == 0):
                # F G, W and C W are there
                cute.arch.sync_threads()
                found = self.correlations(parts, x.after, th)
            these, own = values, x
            if const_expr(it + 1 < self.passes):
                row = first + self.rows
                came = self.load_state(mine.source, row, th)
                x = dataclasses.replace(x, u=self.load_corrections(mine.u, mine.live, row, th))
                values = self.load_tokens(mine.v, mine.span, mine.hv, row, th)
                cute.arch.sync_warp()
            self.answer(p, o, matrices, found, own, these, th)
            self.store_rows(p, mine, first, th)
            if mine.folds:
                self.fold(raw, own, mine.goal, mine.chance, first, th)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        heads: cute.FastDivmodDivisorV2, slots: Int32, tokens: Int32, ring_rows: Int32, ring_seed, later,
        output_gate, norm_weight, norm_eps,
    ):  # fmt: skip
        options = Options(
            scale,
            softplus_beta,
            softplus_threshold,
            lower_bound,
            beta_scale,
            null_index,
            use_qk_l2norm,
        )
        th = fr.Thread.here()
        vt, hv, n = self.place()
        hq, within = divmod(hv, heads)
        slot, write_slot = self.slots_of(n, read_index, write_index, None, None, None)
        base = ring_base[n]
        count = ring_count[n]
        if const_expr(self.ahead > 0):
            requests = cute.arch.grid_dim()[2]
            next_n = cutlass.min(n + later, requests - 1)
            next_slot, next_base, next_count = (
                read_index[next_n],
                ring_base[next_n],
                ring_count[next_n],
            )
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        span = Span(n, Int32(0), tokens, False)
        v0 = vt * self.tile_v
        row0 = v0 + cutlass.min(th.warp, self.row_warps - 1) * (self.rows * self.passes)

        # what does not hang on the slot is loaded while the slot's index is on its way
        A, bias, _ = self.head_gate(A_log, dt_bias, None, None, hq, hv)
        loaded = self.stage.load(k, q, span, hq, th.tid)
        ga, gb = self.load_gates(a, b, span, hv, th.lane)
        cute.arch.sync_warp()

        live_slot, writes = self.named(slot, write_slot, slots, null_index)
        if live_slot:
            live = self.window(base, count, ring_rows)
            k_rows = ring_k[Int64(slot), Int64(hq), None, None]
            u_rows = ring_u[Int64(slot), Int64(hv), None, None]
            decays = ring_decay[Int64(slot), Int64(hv), None]
            # ahead of the state, which is more: what is made of the ring is to be ready when the state comes
            old_decay = self.load_decay(decays, live, th.lane)
            old_keys = self.load_keys(k_rows, live, th)
            cute.arch.sync_warp()
            smem = SmemAllocator()
            source = state[Int64(slot), hv, None, None]
            own = self.own_memory(smem, th)
            came = self.ask_state(source, row0, th, own)
            old_u = self.load_corrections(u_rows, live, row0, th)
            values = self.load_tokens(v, span, hv, row0, th)
            rest = self.ask_rest(output_gate, norm_weight, norm_eps, n, hv, tokens, th)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            if const_expr(self.ahead > 0):
                # not by the last warp, for which the others wait
                if th.warp == max(self.shape.warps - 2, 0) and n + later < requests:
                    later_live, _ = self.named(next_slot, next_slot, slots, null_index)
                    if later_live:
                        at = Int64(next_slot)
                        ring = (
                            ring_u[at, Int64(hv), None, None],
                            ring_k[at, Int64(hq), None, None],
                            ring_decay[at, Int64(hv), None],
                        )
                        window = self.window(next_base, next_count, ring_rows)
                        self.fetch_later(
                            ring,
                            window,
                            (v, k, q, a, b),
                            next_n,
                            hq,
                            hv,
                            within == 0,
                            tokens,
                            th.lane,
                        )
                cute.arch.sync_warp()
            o = allocate(smem, self.shape, False, False, k.element_type)
            rows = const_expr(self.shape.terms * self.ring)
            keys = smem.allocate_tensor(BF, matrix(rows, self.shape.stride, self.shape.stride), 16)
            matrices = smem.allocate_tensor(BF, cute.make_layout((self.matrices * MATRIX,)), 16)
            parts = smem.allocate_tensor(F32, self.parts_layout(), 16)
            # Late: always so, which no compiler knows. It would else work out norms and gates, and wait for k and q, ahead of the state.
            going = cutlass.Boolean(True)
            if const_expr(self.late):
                going = tokens > 0
            if going:
                folds = live.count >= cutlass.min(flush_min, self.ring + 1 - tokens)
                appended = cutlass.select_(append != 0, tokens, Int32(0))
                beta = cutlass.select_(th.lane < tokens, self.beta_of(gb, beta_scale), F32(0.0))
                decay = self.decay_of(ga, A, bias, options)
                decay = cutlass.select_(th.lane < tokens, decay, F32(1.0))
                self.stage.fill(loaded, o, th.tid)
                if vt == 0:
                    if within == 0:
                        self.append_keys(loaded, k_rows, live, appended, th.tid)
                    if th.tid < appended:
                        decays[live.place(live.count + th.tid)] = decay
                cute.arch.sync_threads()
                # by the last warp, while the ring is on its way
                self.prepare(o, matrices, th, decay, beta, scale, use_qk_l2norm)
                words = self.key_words(old_keys)
                self.correlate(o, words, parts, th)
                if folds:
                    self.keep_keys(words, keys, th)
                after, total = self.behind(old_decay, th.lane)
                # warps without rows of their own go along with the last one's, and write nothing
                writing = writes and folds
                shown = tokens
                if const_expr(32 * self.row_warps != self.threads):
                    owner = th.warp < self.row_warps
                    writing = writing and owner
                    shown = cutlass.select_(owner, tokens, Int32(0))
                    appended = cutlass.select_(owner, appended, Int32(0))
                goal = state[Int64(write_slot), hv, None, None]
                out = self.outputs_of(smem, output, n, hv)
                chance = Chance(ring_seed, hv, write_slot)
                mine = Mine(
                    source, goal, writing, u_rows, live, appended, v, hv, span, out, shown, chance
                )
                x = Corrected(keys, old_u, after, total)
                self.run_rows(o, matrices, parts, x, mine, came, values, row0, th)
                self.finish(rest, out, output, th)
        else:
            self.zero_rows(output, n, Int32(0), tokens, hv, v0, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return compiled(Ring(facts, knobs), facts, options, prefix)
